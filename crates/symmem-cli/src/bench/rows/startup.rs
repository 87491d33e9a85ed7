//! From nothing to the first barrier.

use std::time::Duration;

use super::{How, Measure, Row, Target};

pub(super) const ROW: Row = Row {
    name: "startup",
    about: "processes started, world joined, first barrier done",
    ranks: 16,
    how: How::FromOutside,
    measures: &[Measure {
        system: "symmem",
        collective: "startup",
        bytes: 0,
        batch: 1,
        samples: super::super::startup::TIMES,
        floor: None,
        target: Some(Target::Within(Duration::from_secs(2))),
        make: None,
    }],
};
