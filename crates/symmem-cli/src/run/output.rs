//! The ranks' output: cut into lines, marked with the rank, and written without ever blocking the launcher.

use std::collections::VecDeque;
use std::io::{IsTerminal, Stderr, Stdout};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;

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
///
/// There is one queue for both, so that lines keep their order, and parts of lines are never mixed
/// where both end in the same terminal.
pub(super) struct Printer {
    queue: VecDeque<(Stream, Vec<u8>)>,
    /// How much of the first entry has been written.
    written: usize,
    queued: usize,
    colour: [bool; 2],
    out: Stdout,
    err: Stderr,
}

impl Printer {
    /// With more than this in the queue, the ranks have to wait.
    const FULL: usize = 1 << 20;
    /// A pipe that polls as writable takes this much without blocking.
    const CHUNK: usize = 4096;

    pub(super) fn new() -> Self {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let colour = [wanted && out.is_terminal(), wanted && err.is_terminal()];
        Self { queue: VecDeque::new(), written: 0, queued: 0, colour, out, err }
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
        let fits = |last: &(Stream, Vec<u8>)| last.0 == stream && last.1.len() < Self::CHUNK;
        if !self.queue.back().is_some_and(fits) {
            self.queue.push_back((stream, Vec::with_capacity(2 * Self::CHUNK)));
        }
        if let Some((_, bytes)) = self.queue.back_mut() {
            parts.iter().for_each(|part| bytes.extend_from_slice(part));
            self.queued += parts.iter().map(|part| part.len()).sum::<usize>();
        }
    }

    /// Whether the ranks should wait before they write more.
    pub(super) fn is_full(&self) -> bool {
        self.queued > Self::FULL
    }

    /// Forgets what is not yet written.
    pub(super) fn abandon(&mut self) {
        self.queue.clear();
        (self.written, self.queued) = (0, 0);
    }

    /// Where the next bytes go, if there are any.
    pub(super) fn target(&self) -> Option<BorrowedFd<'_>> {
        self.queue.front().map(|(stream, _)| self.fd(*stream))
    }

    fn fd(&self, stream: Stream) -> BorrowedFd<'_> {
        match stream {
            Stream::Out => self.out.as_fd(),
            Stream::Err => self.err.as_fd(),
        }
    }

    /// Writes a little to the target, which has polled as writable. Returns a stream that nobody reads any more.
    pub(super) fn write_some(&mut self) -> Option<Stream> {
        let (stream, bytes) = self.queue.front()?;
        let stream = *stream;
        let rest = &bytes[self.written..];
        let left = rest.len();
        match rustix::io::write(self.fd(stream), &rest[..left.min(Self::CHUNK)]) {
            Ok(count) => {
                self.written += count;
                self.queued -= count;
                if count == left {
                    self.queue.pop_front();
                    self.written = 0;
                }
                None
            }
            Err(Errno::INTR | Errno::AGAIN) => None,
            Err(_) => Some(stream),
        }
    }

    /// Forgets what is queued for `stream`.
    pub(super) fn drop_stream(&mut self, stream: Stream) {
        self.queue.retain(|(other, _)| *other != stream);
        self.written = 0;
        self.queued = self.queue.iter().map(|(_, bytes)| bytes.len()).sum();
    }
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
