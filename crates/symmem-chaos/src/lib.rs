//! Random programs with faults: what they are, and how one rank runs one. Whether all went well is judged by the program
//! `chaos`; it is a crate of its own because here all collectives of all types are compiled, which takes long.

pub mod api;
mod behind;
pub mod board;
pub mod element;
pub mod hooks;
pub mod lane;
mod memory;
mod messages;
pub mod program;
pub mod random;
pub mod record;
mod slices;
