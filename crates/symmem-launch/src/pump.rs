//! Writes to standard output or standard error without ever blocking the launcher.
//!
//! Whether a terminal, or a pipe that others write to as well, takes as much as one has cannot be known beforehand, and
//! making it non-blocking would do so for everybody who has it. So a thread of its own writes, and may be left behind.

use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// A thread that writes what comes through a pipe.
pub(super) struct Pump {
    /// Closed when nothing more will come.
    input: Option<OwnedFd>,
    /// Ends when the thread has.
    done: OwnedFd,
}

impl Pump {
    /// Starts writing to `to`.
    pub(super) fn start(to: impl AsFd + Send + 'static) -> Result<Self> {
        let (from, input) = std::io::pipe().context("cannot make a pipe for output")?;
        let (done, ending) = std::io::pipe().context("cannot make a pipe for output")?;
        rustix::io::ioctl_fionbio(&input, true).context("cannot make a pipe non-blocking")?;
        let work = move || {
            if let Err(error) = carry(from, to.as_fd()) {
                tracing::debug!(%error, "cannot write output");
            }
            drop(ending);
        };
        thread::Builder::new().name("symmem-output".into()).spawn(work)?;
        Ok(Self { input: Some(input.into()), done: done.into() })
    }

    /// What has to be polled: that it takes bytes, if some are `waiting`, and that nobody reads any more; after
    /// [`close`](Self::close), that all is written.
    pub(super) fn poll(&self, waiting: bool) -> (BorrowedFd<'_>, PollFlags) {
        match &self.input {
            Some(input) if waiting => (input.as_fd(), PollFlags::OUT),
            Some(input) => (input.as_fd(), PollFlags::empty()),
            None => (self.done.as_fd(), PollFlags::IN),
        }
    }

    /// Takes some of `bytes`, and says how many; an error if nobody reads them.
    pub(super) fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let input = self.input.as_ref().ok_or(Errno::PIPE)?;
        match rustix::io::write(input, bytes) {
            Err(Errno::INTR | Errno::AGAIN) => Ok(0),
            result => result,
        }
    }

    /// Nothing more will come.
    pub(super) fn close(&mut self) {
        self.input = None;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.input.is_none()
    }
}

fn carry(mut from: PipeReader, to: BorrowedFd<'_>) -> Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let count = match from.read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            result => result?,
        };
        let mut rest = buffer.get(..count).unwrap_or(&[]);
        if rest.is_empty() {
            return Ok(());
        }
        while !rest.is_empty() {
            match rustix::io::write(to, rest) {
                Ok(count) => rest = rest.get(count..).unwrap_or(&[]),
                Err(Errno::INTR) => {}
                // Others who have it made it so.
                Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(&to, PollFlags::OUT)], None)),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls once, without waiting.
    fn is_ready(pump: &Pump, waiting: bool) -> bool {
        let (fd, flags) = pump.poll(waiting);
        poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&Default::default())).unwrap() == 1
    }

    fn until_ready(pump: &Pump, waiting: bool) {
        while !is_ready(pump, waiting) {
            thread::yield_now();
        }
    }

    #[test]
    fn all_is_written_before_the_end_is_told() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut pump = Pump::start(writer).unwrap();
        until_ready(&pump, true);
        assert_eq!(pump.write(b"all of it").unwrap(), 9);
        pump.close();
        until_ready(&pump, false);
        let mut all = String::new();
        reader.read_to_string(&mut all).unwrap();
        assert_eq!(all, "all of it");
    }

    #[test]
    fn a_reader_that_takes_nothing_is_noticed_and_does_not_block() {
        let (reader, writer) = std::io::pipe().unwrap();
        let pump = Pump::start(writer).unwrap();
        // Two pipes and a buffer take less than this.
        assert!((0..1000).all(|_| pump.write(&[0; 4096]).is_ok()));
        assert!(!is_ready(&pump, true));
        drop(reader);
        until_ready(&pump, false);
        assert_eq!(pump.write(b"more"), Err(Errno::PIPE));
    }
}
