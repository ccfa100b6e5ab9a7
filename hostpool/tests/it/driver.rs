//! Pools that are registered with a driver of our own, which checks its calls.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use uzone_hostpool::{
    Budget, HostPool, HostPoolError, HostPoolOptions, Pages, Register, RegisterError, Registration,
    Vendor, leaked,
};
use uzone_os::Addr;
use uzone_pages::ByteLen;

const LONG: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// The stub driver, built for one test, with its orders.
pub(crate) struct Stub {
    library: PathBuf,
}

impl Stub {
    pub(crate) fn new(name: &str, orders: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("uzone-stub-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let library = folder.join(format!("{name}.so"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stub_driver.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]);
        assert!(cc.arg(&library).arg(source).arg("-lpthread").status().unwrap().success());
        let stub = Self { library };
        fs::write(stub.beside("orders"), orders).unwrap();
        stub
    }

    pub(crate) fn beside(&self, end: &str) -> PathBuf {
        PathBuf::from(format!("{}.{end}", self.library.display()))
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.library.clone()
    }

    pub(crate) fn options(&self) -> HostPoolOptions {
        let library = Registration::Library(Vendor::Cuda, self.library());
        HostPoolOptions::default().register(library).pages(Pages::Small)
    }

    /// The calls so far: the name, where it starts from `base` on, its length, and the code that was returned.
    pub(crate) fn calls(&self, base: usize) -> Vec<(String, u64, u64, i32)> {
        let log = fs::read_to_string(self.beside("log")).unwrap();
        assert!(!log.contains("WRONG"), "{log}");
        let call = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let hex = |word: &str| u64::from_str_radix(word, 16).unwrap();
            let start = hex(words[1]) - base as u64;
            (words[0].to_owned(), start, hex(words[2]), words[3].parse().unwrap())
        };
        log.lines().map(call).collect()
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        for path in [self.library.clone(), self.beside("orders"), self.beside("log")] {
            let _ = fs::remove_file(path); // the library stays loaded
        }
    }
}

#[test]
fn all_of_a_pool_is_registered_once_in_order_on_block_borders_and_unregistered() {
    let stub = Stub::new("whole", "context");
    let options = stub.options().block(ByteLen::mib(3)).piece(ByteLen::mib(16));
    let pool = HostPool::open(ByteLen::mib(100), options).unwrap();
    assert_eq!((pool.blocks(), pool.len()), (33, ByteLen::mib(99)));
    assert_eq!(pool.wait_ready(ByteLen::tib(1), LONG).unwrap(), pool.len());
    let base = pool.addr().get();
    let calls = stub.calls(base);
    let mut at = 0;
    for (call, start, len, code) in &calls {
        assert!(call == "register" && *start == at && *code == 0, "{calls:?}");
        assert!(len % (3 * MIB) == 0 && *len <= 16 * MIB, "{calls:?}");
        at += len;
    }
    assert_eq!(at, 99 * MIB);
    let report = pool.report();
    assert_eq!((report.pieces, report.ready), (calls.len(), pool.len()));
    assert!(report.registered_by == "CUDA" && report.all_ready >= report.first_ready);
    drop(pool);
    let calls = stub.calls(base);
    let unregistered: u64 =
        calls.iter().filter(|call| call.0 == "unregister").map(|call| call.2).sum();
    assert_eq!(unregistered, 99 * MIB);
}

#[test]
fn a_run_lies_in_one_registration_if_it_fits_into_one_and_names_them_otherwise() {
    let stub = Stub::new("runs", "context");
    let options = stub.options().piece(ByteLen::mib(16)).budget(Budget::Eager);
    let pool = HostPool::open(ByteLen::mib(124), options).unwrap();
    let calls = stub.calls(pool.addr().get());
    let registered = |part: (Addr, ByteLen)| {
        let start = (part.0.get() - pool.addr().get()) as u64;
        let is_inside = |call: &(String, u64, u64, i32)| {
            call.1 <= start && start + part.1.get() <= call.1 + call.2
        };
        assert!(calls.iter().any(is_inside), "{part:?} {calls:?}");
    };
    for blocks in [1, 2, 3, 5, 8, 9, 20, pool.blocks()] {
        let mut runs = Vec::new();
        while let Ok(run) = pool.take_run(blocks, LONG) {
            assert!(blocks > 8 || run.parts().count() == 1, "{run:?}");
            run.parts().for_each(registered);
            let len: u64 = run.parts().map(|part| part.1.get()).sum();
            assert_eq!((run.parts().next().unwrap().0, len), (run.addr(), run.len().get()));
            runs.push(run);
        }
        assert!(!runs.is_empty(), "{blocks}");
    }
}

#[test]
fn a_thread_without_a_context_gets_an_error_that_names_the_fix_and_no_context() {
    let stub = Stub::new("bare", "");
    let error = HostPool::open(ByteLen::mib(8), stub.options()).unwrap_err();
    assert!(matches!(error, HostPoolError::Driver(_)), "{error}");
    assert!(error.to_string().contains("torch.cuda.init()"), "{error}");
    let missing = Registration::Library(Vendor::Hip, "/nowhere/libamdhip64.so".into());
    let options = HostPoolOptions::default().register(missing);
    let error = HostPool::open(ByteLen::mib(8), options).unwrap_err().to_string();
    assert!(error.contains("UZONE_HIP_LIBRARY"), "{error}");
}

#[test]
fn blocks_that_were_registered_before_a_failure_stay_usable() {
    let stub = Stub::new("half", "context fail_at 3");
    let pool = HostPool::open(ByteLen::mib(64), stub.options()).unwrap();
    let blocks: Vec<_> = (0..3).map(|_| pool.take(LONG).unwrap()).collect();
    let error = pool.take(LONG).unwrap_err();
    assert!(matches!(error, HostPoolError::Register { .. }), "{error}");
    let text = uzone_os::with_causes(&error);
    assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    assert!(pool.wait_ready(pool.len(), LONG).is_err());
    assert_eq!(pool.ready(), ByteLen::mib(6));
    assert!(pool.report().notes.iter().any(|note| note.contains("cannot register")));
    drop(blocks);
    assert!(pool.take(LONG).is_ok());
}

#[test]
fn hip_registers_by_its_own_functions_and_its_pending_error_is_taken_back() {
    let stub = Stub::new("hip", "context fail_at 3");
    let hip = Registration::Library(Vendor::Hip, stub.library());
    let options = || HostPoolOptions::default().register(hip.clone()).pages(Pages::Small);
    let pool = HostPool::open(ByteLen::mib(64), options()).unwrap();
    let error = uzone_os::with_causes(&pool.wait_ready(pool.len(), LONG).unwrap_err());
    assert!(error.contains("hipHostRegister failed: hipErrorOutOfMemory (2)"), "{error}");
    assert_eq!((pool.ready(), pool.report().registered_by), (ByteLen::mib(6), "HIP".to_owned()));
    let base = pool.addr().get();
    drop(pool);
    let calls = stub.calls(base); // none was WRONG, such as one with an error that is pending
    assert_eq!(calls.iter().filter(|call| call.0 == "unregister").count(), 2);
    let pool = HostPool::open(ByteLen::mib(16), options().budget(Budget::Eager)).unwrap();
    assert_eq!(pool.ready(), pool.len());
}

#[test]
fn all_or_nothing_hands_out_no_block_and_leaves_nothing_registered() {
    let stub = Stub::new("nothing", "context fail_at 4");
    let options = stub.options().all_or_nothing();
    let pool = HostPool::open(ByteLen::mib(64), options.clone()).unwrap();
    let base = pool.addr().get();
    assert!(matches!(pool.take(LONG), Err(HostPoolError::Register { .. })));
    drop(pool);
    let calls = stub.calls(base);
    let count = |name: &str, code| calls.iter().filter(|it| it.0 == name && it.3 == code).count();
    assert_eq!((count("register", 0), count("register", 2), count("unregister", 0)), (3, 1, 3));
    // The next one has all.
    let pool = HostPool::open(ByteLen::mib(64), options.budget(Budget::Eager)).unwrap();
    assert_eq!(pool.ready(), pool.len());
}

#[test]
fn an_eager_pool_that_cannot_be_registered_is_not_opened() {
    let stub = Stub::new("eager", "context fail_at 2");
    let options = stub.options().budget(Budget::Eager);
    let error = HostPool::open(ByteLen::mib(64), options).unwrap_err();
    assert!(matches!(error, HostPoolError::Register { .. }), "{error}");
}

#[test]
fn a_context_that_was_destroyed_is_an_error_with_its_name() {
    let stub = Stub::new("destroyed", "context destroyed");
    let pool = HostPool::open(ByteLen::mib(8), stub.options()).unwrap();
    let error = uzone_os::with_causes(&pool.take(LONG).unwrap_err());
    assert!(error.contains("CUDA_ERROR_CONTEXT_IS_DESTROYED"), "{error}");
}

#[test]
fn memory_that_cannot_be_unregistered_stays_mapped_and_is_counted() {
    let stub = Stub::new("stuck", "context fail_unregister 2");
    let pool = HostPool::open(ByteLen::mib(14), stub.options().budget(Budget::Eager)).unwrap();
    let (base, before) = (pool.addr().get(), leaked());
    drop(pool);
    assert!(leaked() > before);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let is_mapped = maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let hex = |text| usize::from_str_radix(text, 16).unwrap();
        hex(start) <= base && base < hex(end)
    });
    assert!(is_mapped);
}

#[test]
fn on_demand_each_block_is_registered_by_its_first_taker_alone() {
    let stub = Stub::new("demand", "context");
    let options = stub.options().budget(Budget::OnDemand);
    let pool = HostPool::open(ByteLen::gib(64), options).unwrap();
    assert_eq!(pool.ready(), ByteLen::ZERO);
    let base = pool.addr().get();
    let (one, run) = (pool.take(LONG).unwrap(), pool.take_run(3, LONG).unwrap());
    assert_eq!(pool.ready(), ByteLen::mib(8));
    drop(one);
    drop(pool.take(LONG).unwrap());
    let lens: Vec<_> = stub.calls(base).into_iter().map(|call| (call.1, call.2)).collect();
    let two = 2 * MIB;
    assert_eq!(lens, [(0, two), (two, two), (2 * two, two), (3 * two, two)]);
    assert!(matches!(pool.wait_ready(pool.len(), LONG), Err(HostPoolError::NotReady { .. })));
    drop(run);
}

#[test]
fn another_thread_has_the_driver_between_two_pieces() {
    // A registration of 64 MiB holds the lock for 2 ms here, as the real one does, and all of the pool for 17 ms.
    let lock = Arc::new(Mutex::new(0_u32));
    struct Slow(Arc<Mutex<u32>>);
    impl Register for Slow {
        fn register(&self, _: Addr, len: ByteLen) -> Result<(), RegisterError> {
            let mut calls = self.0.lock().unwrap();
            std::thread::sleep(Duration::from_nanos(len.get() / 30));
            *calls += 1;
            Ok(())
        }
        fn unregister(&self, _: Addr) -> Result<(), RegisterError> {
            Ok(())
        }
    }
    let options =
        HostPoolOptions::default().register(Registration::With(Arc::new(Slow(lock.clone()))));
    let pool = HostPool::open(ByteLen::mib(512), options.pages(Pages::Small)).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    while pool.ready() < pool.len() {
        seen.insert(*lock.lock().unwrap());
        std::thread::sleep(Duration::from_micros(50));
    }
    // It came between many pieces; a loop without pauses lets it in between none.
    assert!(seen.len() * 4 >= pool.report().pieces, "{seen:?} {}", pool.report());
}
