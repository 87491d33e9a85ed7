//! What every backend must do, as functions of one rank. Each is run by several ranks at once.

mod all_to_all_v;
mod collectives;
pub mod every_backend;
mod groups;
mod hosts;
mod memory;
mod messages;
mod one_sided;
mod phases;
mod signals;
mod slices;

use std::time::Duration;

use symmem::{Deadline, World};

pub use all_to_all_v::*;
pub use collectives::*;
pub use groups::*;
pub use hosts::*;
pub use memory::*;
pub use messages::*;
pub use one_sided::*;
pub use phases::*;
pub use signals::*;
pub use slices::*;

const SOON: Deadline = Deadline::within(Duration::from_secs(30));
const SHORT: Deadline = Deadline::within(Duration::from_millis(50));

fn next(world: &World) -> usize {
    (world.rank() + 1) % world.size()
}

fn previous(world: &World) -> usize {
    (world.rank() + world.size() - 1) % world.size()
}

/// Rank `rank`'s part, wherever that rank is.
fn part_of<T: symmem::Element + Default>(shared: &symmem::Shared<T>, rank: usize) -> Vec<T> {
    let mut part = vec![T::default(); shared.len()];
    shared.get(rank, 0, &mut part).unwrap();
    part
}
