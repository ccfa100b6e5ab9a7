//! What a zone logs where no caller can be given an error: a pagemap that is dropped while its
//! pages are held.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span, subscriber};
use uzone_pages::{ByteLen, MemoryKind};
use uzone_zone::{BindOptions, Pagemap, Region, Zone};

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

/// Held by each test: one asks whether an address is mapped, and the other would map there.
static ALONE: Mutex<()> = Mutex::new(());

fn bound() -> Pagemap {
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
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
    let address = pinned.segments().next().unwrap().address;

    let events = logged(|| drop(pagemap));
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

    // The memory is there as long as anybody holds it, and not longer.
    assert!(is_mapped(address));
    let events = logged(|| drop((pinned, again)));
    assert!(events.is_empty() && is_mapped(address));
    let events = logged(|| drop(referenced));
    assert!(events.is_empty() && !is_mapped(address));
}

#[test]
fn a_pagemap_that_is_unbound_or_not_held_is_not_logged() {
    let _alone = ALONE.lock();
    let events = logged(|| {
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

/// Whether this process has anything mapped at an address, by the kernel's own list.
fn is_mapped(address: usize) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start)..number(end)).contains(&address)
    })
}
