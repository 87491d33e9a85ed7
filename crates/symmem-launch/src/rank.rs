//! One rank: its process, its process group and what it writes.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::process::{getpgid, kill_process, kill_process_group, waitid};

use super::output::{Lines, Printer, Stream, Tail};
use super::{NotStarted, signals};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this code.
    Exit(i32),
    /// By a signal.
    Signal {
        /// Its number.
        number: i32,
        /// Whether there is a core file.
        core: bool,
    },
}

impl End {
    /// Whether it ended well.
    pub fn is_success(self) -> bool {
        self == Self::Exit(0)
    }

    /// What a shell would report.
    pub fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code as u8,
            Self::Signal { number, .. } => 128 | number as u8,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal { number, core } => {
                let core = if core { " (core dumped)" } else { "" };
                write!(f, "killed by {}{core}", signals::name(number))
            }
        }
    }
}

/// A started rank. It is reaped with all that is left of the job, so that the number of its process
/// group cannot pass to strangers while signals are still sent to it.
pub(super) struct Rank {
    pub(super) end: Option<End>,
    pub(super) written: Written,
    /// Its process, which leads a process group.
    pub(super) group: Pid,
    pipes: [Option<Pipe>; 2],
}

/// What a rank has written.
pub(super) struct Written {
    pub(super) rank: usize,
    pub(super) tail: Tail,
    /// Standard output, where it is collected instead of shown.
    pub(super) collected: Option<Vec<u8>>,
    /// How much of it has been shown to who watches.
    shown: usize,
}

struct Pipe {
    fd: OwnedFd,
    lines: Lines,
    /// How many bytes may still come after the rank's end: as many as a pipe can hold. A process elsewhere that has got
    /// hold of the pipe must not keep us.
    left: usize,
}

impl Rank {
    /// Starts `command`, which has been bound to the launcher.
    pub(super) fn start(rank: usize, mut command: Command, collect: bool) -> Result<Self> {
        let program = command.get_program().to_owned();
        let mut process = command.spawn().map_err(|source| NotStarted { program, source })?;
        let out = process.stdout.take().map(OwnedFd::from);
        let err = process.stderr.take().map(OwnedFd::from);
        let group = Pid::from_child(&process);
        let pipes = [out.map(Pipe::new).transpose()?, err.map(Pipe::new).transpose()?];
        let collected = collect.then(Vec::new);
        let written = Written { rank, tail: Tail::default(), collected, shown: 0 };
        Ok(Self { end: None, written, group, pipes })
    }

    /// Sends `signal` to the rank and all of its process group.
    pub(super) fn signal(&self, signal: Signal) {
        let mut sent = kill_process_group(self.group, signal);
        // It may have joined another one.
        if getpgid(Some(self.group)) != Ok(self.group) {
            sent = kill_process(self.group, signal);
        }
        if let Err(error) = sent {
            tracing::debug!(rank = self.written.rank, %error, "cannot send a signal");
        }
    }

    /// Whether the rank has ended since the last look.
    pub(super) fn has_just_ended(&mut self) -> Result<bool> {
        if self.end.is_some() {
            return Ok(false);
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.group), options).context("cannot wait for a rank")?;
        self.end = status.map(|status| match status.terminating_signal() {
            Some(number) => End::Signal { number, core: status.dumped() },
            None => End::Exit(status.exit_status().unwrap_or(1)),
        });
        Ok(self.end.is_some())
    }

    /// The open ends of the rank's output.
    pub(super) fn pipes(&self) -> impl Iterator<Item = (Stream, BorrowedFd<'_>)> {
        let streams = Stream::BOTH.into_iter().zip(&self.pipes);
        streams.filter_map(|(stream, pipe)| Some((stream, pipe.as_ref()?.fd.as_fd())))
    }

    /// Reads once from `stream`; whether there may be more at once.
    pub(super) fn read(&mut self, stream: Stream, buffer: &mut [u8], to: &mut Printer) -> bool {
        let Some(pipe) = &mut self.pipes[stream as usize] else { return false };
        match rustix::io::read(&pipe.fd, &mut *buffer) {
            Err(Errno::AGAIN) => false,
            Err(Errno::INTR) => true,
            Ok(0) | Err(_) => {
                self.close(stream, to);
                false
            }
            Ok(count) => {
                self.written.bytes(stream, &buffer[..count]);
                pipe.lines.feed(&buffer[..count], |line| self.written.line(stream, line, to));
                true
            }
        }
    }

    /// Reads what the rank has written until now.
    pub(super) fn drain(&mut self, buffer: &mut [u8], to: &mut Printer) {
        for stream in Stream::BOTH {
            while self.has_left(stream) && self.read(stream, buffer, to) {
                self.count(stream, buffer.len());
            }
        }
    }

    /// Reads what the rank has written before its end, as long as there is room for it, and closes what has been read.
    pub(super) fn read_rest(&mut self, buffer: &mut [u8], to: &mut Printer) {
        for stream in Stream::BOTH {
            while self.pipes[stream as usize].is_some() && !to.is_full(stream) {
                if !(self.has_left(stream) && self.read(stream, buffer, to)) {
                    self.close(stream, to);
                }
                self.count(stream, buffer.len());
            }
        }
    }

    fn has_left(&self, stream: Stream) -> bool {
        self.pipes[stream as usize].as_ref().is_some_and(|pipe| pipe.left > 0)
    }

    fn count(&mut self, stream: Stream, bytes: usize) {
        if let Some(pipe) = &mut self.pipes[stream as usize] {
            pipe.left = pipe.left.saturating_sub(bytes);
        }
    }

    /// Closes one stream: processes that still write there get SIGPIPE.
    pub(super) fn close(&mut self, stream: Stream, to: &mut Printer) {
        if let Some(mut pipe) = self.pipes[stream as usize].take() {
            pipe.lines.finish(|line| self.written.line(stream, line, to));
        }
    }
}

impl Written {
    fn bytes(&mut self, stream: Stream, bytes: &[u8]) {
        if let (Stream::Out, Some(collected)) = (stream, &mut self.collected) {
            collected.extend_from_slice(bytes);
        }
    }

    /// Hands the collected lines that are complete and not yet shown to `watch`.
    pub(super) fn show_fresh(&mut self, watch: &mut dyn FnMut(usize, &[u8])) {
        let fresh = self.collected.as_deref().and_then(|all| all.get(self.shown..)).unwrap_or(&[]);
        let lines = fresh.split_inclusive(|&byte| byte == b'\n');
        for line in lines.filter_map(|line| line.strip_suffix(b"\n")) {
            self.shown += line.len() + 1;
            watch(self.rank, line);
        }
    }

    fn line(&mut self, stream: Stream, line: &[u8], to: &mut Printer) {
        self.tail.push(line);
        if stream == Stream::Err || self.collected.is_none() {
            to.line(stream, self.rank, line);
        }
    }
}

impl Pipe {
    fn new(fd: OwnedFd) -> Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true).context("cannot make a pipe non-blocking")?;
        Ok(Self { fd, lines: Lines::default(), left: 2 << 20 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_named_and_numbered_as_a_shell_does() {
        assert_eq!(End::Exit(3).to_string(), "exit code 3");
        assert_eq!(End::Exit(3).code(), 3);
        let killed = End::Signal { number: 9, core: false };
        assert_eq!(killed.to_string(), "killed by SIGKILL");
        assert_eq!(killed.code(), 137);
        let crashed = End::Signal { number: 11, core: true };
        assert_eq!(crashed.to_string(), "killed by SIGSEGV (core dumped)");
        assert_eq!(crashed.code(), 139);
    }

    #[test]
    fn collected_output_is_kept_as_it_came() {
        let mut command = Command::new("sh");
        command.args(["-c", r"printf 'a\n\377b'; exit 4"]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let mut rank = Rank::start(3, command, true).unwrap();
        while !rank.has_just_ended().unwrap() {
            std::thread::yield_now();
        }
        let mut printer = Printer::new().unwrap();
        rank.read_rest(&mut [0; 16], &mut printer);
        assert_eq!(rank.end, Some(End::Exit(4)));
        assert_eq!(rank.written.collected.as_deref(), Some(b"a\n\xffb".as_slice()));
        assert_eq!(rank.written.tail.lines().count(), 2);
        let mut seen = Vec::new();
        (0..2).for_each(|_| {
            rank.written.show_fresh(&mut |rank, line| seen.push((rank, line.to_vec())))
        });
        assert_eq!(seen, [(3, b"a".to_vec())]);
        assert!(rank.pipes().next().is_none());
        // Reaps it.
        assert!(waitid(WaitId::Pid(rank.group), WaitIdOptions::EXITED).unwrap().is_some());
    }
}
