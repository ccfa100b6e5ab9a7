//! What a zone logs: each step, and where no caller can be given an error, a pagemap that is dropped while
//! its pages are held.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span, subscriber};
use uzone_pages::{ByteLen, MemoryKind};
use uzone_zone::{BindOptions, Init, Pagemap, PopulateOptions, Region, ZeroOptions, Zone};

/// The fields of each event, by name, and its level.
type Events = Arc<Mutex<Vec<(Level, BTreeMap<&'static str, String>)>>>;

struct Collect(Events);

impl Subscriber for Collect {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.lock().unwrap().push((*event.metadata().level(), fields.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

/// Runs `act` and returns what it logged.
fn logged(act: impl FnOnce()) -> Vec<(Level, BTreeMap<&'static str, String>)> {
    let events = Events::default();
    subscriber::with_default(Collect(events.clone()), act);
    std::mem::take(&mut *events.lock().unwrap())
}

/// The same without what is logged of each step for those who look closer.
fn problems(act: impl FnOnce()) -> Vec<(Level, BTreeMap<&'static str, String>)> {
    logged(act).into_iter().filter(|(level, _)| *level < Level::DEBUG).collect()
}

/// Held by each test: one asks whether an address is mapped, and the other would map there.
static ALONE: Mutex<()> = Mutex::new(());

/// The name of the memory file of the regions here: the test tells its mappings from the mappings of other tests by it.
const NAME: &str = "uzone-logged";

fn is_mapped() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(NAME)
}

fn bound() -> Pagemap {
    let region = Region::memfd(NAME, ByteLen::mib(1)).unwrap();
    Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap()
}

#[test]
fn a_pagemap_that_is_dropped_while_its_pages_are_held_is_an_error_in_the_log() {
    let _alone = ALONE.lock();
    let pagemap = bound();
    let range = pagemap.range();
    let pinned = pagemap.pin(range).unwrap();
    let again = pinned.try_clone().unwrap();
    let referenced = pagemap.get(range).unwrap();
    pagemap.pin_and_write(100, b"still here").unwrap();

    let events = problems(|| drop(pagemap));
    assert_eq!(events.len(), 1, "{events:?}");
    let (level, fields) = &events[0];
    assert_eq!(*level, Level::ERROR);
    assert_eq!(fields["pins"], "2");
    assert_eq!(fields["references"], "1");
    assert_eq!(fields["first_pfn"], range.start().get().to_string());
    assert_eq!(fields["pages"], "256");
    assert!(fields["message"].contains("until the last guard"), "{fields:?}");
    assert_eq!(fields.contains_key("who"), cfg!(debug_assertions));
    if cfg!(debug_assertions) {
        assert!(fields["who"].contains("logged.rs"), "{fields:?}");
    }

    // The memory is there as long as a guard holds it, and not longer.
    assert!(is_mapped());
    let events = problems(|| drop((pinned, again)));
    assert!(events.is_empty() && is_mapped());
    let events = problems(|| drop(referenced));
    assert!(events.is_empty() && !is_mapped());
}

#[test]
fn a_pagemap_that_is_unbound_or_not_held_is_not_logged() {
    let _alone = ALONE.lock();
    let events = problems(|| {
        drop(bound());
        drop(bound().unbind().unwrap());
        let pagemap = bound();
        let pinned = pagemap.pin(pagemap.range()).unwrap();
        let pagemap = pagemap.unbind().unwrap_err().pagemap;
        drop(pinned);
        drop(pagemap);
    });
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn each_step_is_logged_at_the_levels_that_show_more() {
    let _alone = ALONE.lock();
    let events = logged(|| {
        let region = Region::anonymous(ByteLen::mib(4)).unwrap();
        let _ = region.populate(0..1 << 20, &PopulateOptions::default()).unwrap();
        let options = BindOptions::new(MemoryKind::Generic).init(Init::Eager);
        let pagemap: Pagemap = Zone::new().bind(region, options).unwrap();
        let _ = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        pagemap.poison(pagemap.range().start()).unwrap();
        drop(pagemap.unbind().unwrap());
    });
    let seen: Vec<_> = events.iter().map(|(_, fields)| fields["message"].clone()).collect();
    let [populate, bind, clear, poison, unbind] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!([populate, clear, poison, unbind], ["populate", "clear", "poison", "unbind"]);
    assert!(bind.starts_with("bind: 8 KiB of descriptors"), "{bind}");
    assert!(events.iter().all(|(level, _)| *level == Level::DEBUG), "{events:?}");
    let fields = &events[1].1;
    assert_eq!(fields["pages"], "1024");
    assert!(fields.contains_key("stores") && fields.contains_key("elapsed"), "{fields:?}");
}
