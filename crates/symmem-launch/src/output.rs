//! The ranks' output: cut into lines, marked with the rank, and written without ever blocking the launcher.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::Result;
use rustix::event::PollFlags;

use super::pump::Pump;

/// Where a line came from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Err,
}

impl Stream {
    pub(super) const BOTH: [Self; 2] = [Self::Out, Self::Err];
}

/// Cuts bytes into lines and holds the last, unfinished one.
#[derive(Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    /// A longer line is cut, so that a rank that never ends its line cannot fill the memory.
    const LONGEST: usize = 1 << 20;

    /// Hands every line that `bytes` completes to `emit`, without its newline.
    pub(super) fn feed(&mut self, bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (line, ends) =
                piece.strip_suffix(b"\n").map_or((piece, false), |line| (line, true));
            if ends && self.0.is_empty() {
                emit(line);
                continue;
            }
            self.0.extend_from_slice(line);
            if ends || self.0.len() >= Self::LONGEST {
                emit(&self.0);
                self.0.clear();
            }
        }
    }

    /// The unfinished line, if there is one; there is none afterwards.
    pub(super) fn finish(&mut self, emit: impl FnOnce(&[u8])) {
        if !self.0.is_empty() {
            emit(&std::mem::take(&mut self.0));
        }
    }
}

/// The last lines a rank wrote.
#[derive(Default)]
pub(super) struct Tail(VecDeque<Vec<u8>>);

impl Tail {
    const LINES: usize = 10;
    const WIDTH: usize = 1000;

    /// Remembers `line` and forgets the oldest.
    pub(super) fn push(&mut self, line: &[u8]) {
        let oldest = if self.0.len() == Self::LINES { self.0.pop_front() } else { None };
        let mut kept = oldest.unwrap_or_default();
        kept.clear();
        kept.extend_from_slice(&line[..line.len().min(Self::WIDTH)]);
        self.0.push_back(kept);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Oldest first.
    pub(super) fn lines(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(Vec::as_slice)
    }
}

/// Whole lines on their way to standard output and standard error.
pub(super) struct Printer {
    queues: [VecDeque<u8>; 2],
    /// Those of targets that are open.
    pumps: [Option<Pump>; 2],
    colour: [bool; 2],
    /// Whether both streams end in the same place: then all goes through one queue, because lines
    /// should keep their order, and no line may begin where one from the other queue is half written.
    same: bool,
}

impl Printer {
    /// With more than this in the queue, the ranks have to wait.
    const FULL: usize = 1 << 20;

    pub(super) fn new() -> Result<Self> {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let colour = [wanted && out.is_terminal(), wanted && err.is_terminal()];
        let same =
            file(out.as_fd()).is_some_and(|file_of_out| Some(file_of_out) == file(err.as_fd()));
        let pumps = [Some(Pump::start(out)?), Some(Pump::start(err)?)];
        Ok(Self { queues: Default::default(), pumps, colour, same })
    }

    /// Queues one line of `rank`.
    pub(super) fn line(&mut self, stream: Stream, rank: usize, line: &[u8]) {
        let prefix = if self.colour[stream as usize] {
            // 31 to 36: the colours that can be read on black and on white.
            format!("\x1b[{}m[{rank}]\x1b[0m ", 31 + rank % 6)
        } else {
            format!("[{rank}] ")
        };
        self.push(stream, &[prefix.as_bytes(), line, b"\n"]);
    }

    /// Queues a line of the launcher's own.
    pub(super) fn say(&mut self, text: &str) {
        self.push(Stream::Err, &[b"symmem: ", text.as_bytes(), b"\n"]);
    }

    /// Queues a line that a rank wrote earlier, as part of what the launcher says.
    pub(super) fn quote(&mut self, line: &[u8]) {
        self.push(Stream::Err, &[b"symmem:   | ", line, b"\n"]);
    }

    fn push(&mut self, stream: Stream, parts: &[&[u8]]) {
        let target = self.queue(stream);
        if self.pumps[target].is_some() {
            parts.iter().for_each(|part| self.queues[target].extend(*part));
        }
    }

    /// Whether what is written to `stream` goes to `target`.
    pub(super) fn leads_to(&self, stream: Stream, target: Stream) -> bool {
        self.queue(stream) == target as usize
    }

    fn queue(&self, stream: Stream) -> usize {
        if self.same { Stream::Out as usize } else { stream as usize }
    }

    /// Whether the ranks should wait before they write more to `stream`.
    pub(super) fn is_full(&self, stream: Stream) -> bool {
        self.queues[self.queue(stream)].len() > Self::FULL
    }

    /// Whether all is written, or nobody wants it.
    pub(super) fn is_idle(&self) -> bool {
        self.pumps.iter().all(Option::is_none)
    }

    /// What has to be polled before [`advance`](Self::advance).
    pub(super) fn targets(&self) -> impl Iterator<Item = (Stream, BorrowedFd<'_>, PollFlags)> {
        Stream::BOTH.into_iter().filter_map(|target| {
            let waiting = !self.queues[target as usize].is_empty();
            let (fd, flags) = self.pumps[target as usize].as_ref()?.poll(waiting);
            Some((target, fd, flags))
        })
    }

    /// Goes on with a target that has polled as ready; `false` if nobody reads it any more.
    pub(super) fn advance(&mut self, target: Stream) -> bool {
        let (queue, pump) = (&mut self.queues[target as usize], &mut self.pumps[target as usize]);
        let Some(open) = pump else { return true };
        if open.is_closed() {
            *pump = None;
            return true;
        }
        let (bytes, _) = queue.as_slices();
        match open.write(bytes) {
            // It is ready without a byte that waits only if it is broken.
            Ok(_) if bytes.is_empty() => false,
            Ok(count) => {
                queue.drain(..count);
                true
            }
            Err(_) => false,
        }
    }

    /// Nothing more will come: what is queued is written, and then all is idle.
    pub(super) fn finish(&mut self) {
        for (queue, pump) in self.queues.iter().zip(&mut self.pumps) {
            pump.iter_mut().filter(|_| queue.is_empty()).for_each(Pump::close);
        }
    }

    /// Forgets what is queued for `target`, and what will be.
    pub(super) fn abandon(&mut self, target: Stream) {
        self.queues[target as usize].clear();
        self.pumps[target as usize] = None;
    }
}

/// What tells one open file from another.
fn file(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        pieces.iter().for_each(|piece| lines.feed(piece, |line| seen.push(line.to_vec())));
        lines.finish(|line| seen.push(line.to_vec()));
        seen
    }

    #[test]
    fn lines_are_put_together_from_pieces() {
        assert_eq!(cut(&[b"a", b"b\nc", b"\n"]), [b"ab".to_vec(), b"c".to_vec()]);
    }

    #[test]
    fn empty_lines_and_an_unfinished_last_line_are_kept() {
        assert_eq!(cut(&[b"\n\nx"]), [b"".to_vec(), b"".to_vec(), b"x".to_vec()]);
    }

    #[test]
    fn bytes_that_are_not_text_pass_unchanged() {
        assert_eq!(cut(&[b"\xff\xfe\0\r\n"]), [b"\xff\xfe\0\r".to_vec()]);
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let part = vec![b'x'; Lines::LONGEST / 2 + 1];
        let lengths: Vec<_> = cut(&[&part, &part, &part]).iter().map(Vec::len).collect();
        assert_eq!(lengths, [2 * part.len(), part.len()]);
    }

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let mut tail = Tail::default();
        (0..25).for_each(|i| tail.push(format!("line {i}").as_bytes()));
        let lines: Vec<_> = tail.lines().collect();
        assert_eq!(lines.len(), Tail::LINES);
        assert_eq!(lines.first(), Some(&b"line 15".as_slice()));
        assert_eq!(lines.last(), Some(&b"line 24".as_slice()));
    }
}
