//! What the launchers of several nodes tell each other, through the store that node 0 hosts.
//!
//! All that happens goes into one list, which every launcher reads in the same order. So all come to the same cause, which is
//! the first failure in it. A launcher leaves when all have ended, or patience is over; node 0, which hosts the store, last.

use std::fmt;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use symmem::Deadline;
use symmem::store::{Store, TcpStore};

use super::{End, Failure, Job, OnFailure, Signals, signals};

/// The list: this, a slash, and the number of the entry.
const LIST: &str = "symmem/launchers/news";
/// Counts the launchers whose ranks have all ended.
const ENDED: &str = "symmem/launchers/ended";
/// Counts those of them that have read the list to its end.
const HEARD: &str = "symmem/launchers/heard";
/// Longer than any list of a job: strangers may write to the store.
const LONGEST: usize = 10_000;

/// How long a launcher waits for nodes that may be gone without a word, if all went well here.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long node 0 waits for the others to read the list.
const READING: Duration = Duration::from_secs(2);
/// How long a launcher tries to reach node 0's store.
const CONNECTING: Duration = Duration::from_secs(300);
/// How long the news that a rank gave up is held back: the rank for which it did has crashed elsewhere, and that is the cause.
const HELD_BACK: Duration = Duration::from_millis(100);

/// What happened on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// A rank failed, the first on its node.
    Failed { node: usize, failure: Failure },
    /// The launcher was told to end, perhaps for the second time.
    Told { node: usize, signal: i32, again: bool },
    /// Node 0 leaves, though others have not ended.
    Left,
}

impl fmt::Display for News {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { node, failure } => {
                let verb = if failure.is_crash() { "was" } else { "failed with" };
                write!(f, "rank {} on node {node} {verb} {}", failure.rank, failure.end)
            }
            Self::Told { node, signal, .. } => {
                write!(f, "node {node} was told to end by {}", signals::name(*signal))
            }
            Self::Left => f.write_str("node 0 has left"),
        }
    }
}

impl News {
    fn encode(&self) -> String {
        match self {
            Self::Failed { node, failure: Failure { rank, end } } => match end {
                End::Exit(code) => format!("failed {node} {rank} exit {code} 0"),
                End::Signal { number, core } => {
                    format!("failed {node} {rank} signal {number} {}", u8::from(*core))
                }
            },
            Self::Told { node, signal, again } => {
                format!("told {node} {signal} {}", u8::from(*again))
            }
            Self::Left => "left".to_owned(),
        }
    }

    fn decode(text: &[u8]) -> Option<Self> {
        let words: Vec<_> = std::str::from_utf8(text).ok()?.split(' ').collect();
        match *words.as_slice() {
            ["failed", node, rank, how, number, core] => {
                let (node, rank) = (node.parse().ok()?, rank.parse().ok()?);
                let number = number.parse().ok()?;
                let end = match how {
                    "exit" => End::Exit(number),
                    _ => End::Signal { number, core: core == "1" },
                };
                (!end.is_success()).then_some(Self::Failed { node, failure: Failure { rank, end } })
            }
            ["told", node, signal, again] => {
                let signal = signal.parse().ok().filter(|s| signals::ENDING.contains(s))?;
                Some(Self::Told { node: node.parse().ok()?, signal, again: again == "1" })
            }
            ["left"] => Some(Self::Left),
            _ => None,
        }
    }
}

/// What a launcher hears.
pub(super) enum Heard {
    News(News),
    /// The store cannot be reached any more.
    Gone(String),
}

/// The other nodes, as one launcher hears of them.
pub(super) struct Nodes {
    node: usize,
    heard: Receiver<Heard>,
    /// Readable when there is something to hear.
    wake: UnixStream,
    post: Option<Sender<News>>,
    /// Closed when all is posted.
    posted: Receiver<()>,
}

impl Nodes {
    /// Starts to listen, if there are others and they share their failures.
    pub(super) fn join(job: &Job, store: &str) -> Result<Option<Self>> {
        if job.nodes == 1 || job.on_failure == OnFailure::Keep {
            return Ok(None);
        }
        let (wake, waker) = UnixStream::pair().context("cannot make a pipe for news")?;
        for end in [&wake, &waker] {
            end.set_nonblocking(true).context("cannot make a pipe for news")?;
        }
        let (tell, heard) = mpsc::channel();
        let address = store.to_owned();
        let tell = move |what| {
            let told = tell.send(what).is_ok();
            // If it is full, there is something to read.
            let _ = (&waker).write(&[0]);
            told
        };
        start("symmem-news", move || listen(&address, tell))?;
        let (post, news) = mpsc::channel();
        let (_done, posted) = mpsc::channel();
        let address = store.to_owned();
        start("symmem-post", move || {
            write_down(&address, &news);
            drop(_done);
        })?;
        Ok(Some(Self { node: job.node, heard, wake, post: Some(post), posted }))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// What has come from other nodes since the last call.
    pub(super) fn take(&self) -> Vec<Heard> {
        let mut bytes = [0; 64];
        while rustix::io::read(&self.wake, &mut bytes).is_ok_and(|count| count > 0) {}
        let own = self.node;
        let is_other = |heard: &Heard| !matches!(heard, Heard::News(News::Failed { node, .. } | News::Told { node, .. }) if *node == own);
        self.heard.try_iter().filter(is_other).collect()
    }

    /// Tells the others. Never waits.
    pub(super) fn tell(&self, news: News) {
        if let Some(post) = &self.post {
            // Fails if the store has gone, and then nobody hears.
            let _ = post.send(news);
        }
    }

    /// Waits a moment until the others have been told.
    fn finish(&mut self) {
        self.post = None;
        let _ = self.posted.recv_timeout(READING);
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    Builder::new().name(name.into()).spawn(work).context("cannot start a thread")?;
    Ok(())
}

fn key(number: usize) -> String {
    format!("{LIST}/{number}")
}

/// Reads the list as it grows.
fn listen(address: &str, tell: impl Fn(Heard) -> bool) {
    // Ranks that need the store say so if it is not there.
    let Ok(store) = TcpStore::connect(address, Deadline::after(CONNECTING)) else { return };
    for number in 0..LONGEST {
        let heard = match store.get(&key(number), Deadline::NEVER) {
            Ok(entry) => match News::decode(&entry) {
                Some(news) => Heard::News(news),
                None => continue,
            },
            Err(error) => Heard::Gone(error.to_string()),
        };
        let is_last = matches!(heard, Heard::Gone(_) | Heard::News(News::Left));
        if !tell(heard) || is_last {
            return;
        }
    }
}

/// Writes what comes to the end of the list.
fn write_down(address: &str, news: &Receiver<News>) {
    let mut store = None;
    for news in news {
        if matches!(&news, News::Failed { failure, .. } if !failure.is_crash()) {
            sleep(HELD_BACK);
        }
        if store.is_none() {
            store = TcpStore::connect(address, Deadline::after(Duration::from_secs(1))).ok();
        }
        let Some(store) = &store else { return };
        if let Err(error) = append(store, &news) {
            tracing::debug!("cannot tell the other nodes: {error:#}");
            return;
        }
    }
}

fn append(store: &TcpStore, news: &News) -> Result<()> {
    let entry = news.encode();
    for number in 0..LONGEST {
        // Nobody has written an empty one, so what is found there is ours or another's.
        if store.compare_set(&key(number), b"", entry.as_bytes())? == entry.as_bytes() {
            return Ok(());
        }
    }
    bail!("the list of news is full")
}

/// The first failure of the list.
fn cause(store: &TcpStore) -> Result<Option<News>> {
    for number in 0..LONGEST {
        let key = key(number);
        if !store.check(&[&key])? {
            break;
        }
        let entry = store.get(&key, Deadline::after(READING))?;
        let news = News::decode(&entry).filter(|news| matches!(news, News::Failed { .. }));
        if news.is_some() {
            return Ok(news);
        }
    }
    Ok(None)
}

/// Tells the others that this node is done, and waits for them until `limit`, or for as long as patience lasts. Returns the
/// cause of the job's failure, the same on all nodes.
pub(super) fn part(
    job: &Job,
    address: &str,
    nodes: Option<Nodes>,
    limit: Option<Instant>,
    signals: &mut Signals,
) -> Result<Option<News>> {
    let shares = nodes.is_some();
    if let Some(mut nodes) = nodes {
        nodes.finish();
    }
    // It has been there all the time, so if it is not there now, node 0 has gone.
    let store = TcpStore::connect(address, Deadline::after(Duration::from_secs(1)))?;
    let mut ended = store.add(ENDED, 1)?;
    if !shares && job.node > 0 {
        return Ok(None);
    }
    let all = i64::try_from(job.nodes)?;
    let limit = limit.unwrap_or_else(|| Instant::now() + PATIENCE);
    while ended < all {
        let ending = |signal: &&i32| signals::ENDING.contains(signal);
        let why = match signals.take().iter().find(ending) {
            Some(&signal) => format!("{} while waiting for", signals::name(signal)),
            None if Instant::now() > limit => "without a word from".to_owned(),
            None => {
                sleep(Duration::from_millis(20));
                ended = store.add(ENDED, 0)?;
                continue;
            }
        };
        if job.node == 0 {
            append(&store, &News::Left)?;
        }
        let found = cause(&store)?;
        tracing::warn!("leaving {why} {} of {all} nodes", all - ended);
        return Ok(found);
    }
    if !shares {
        return Ok(None);
    }
    let found = cause(&store)?;
    let mut heard = store.add(HEARD, 1)?;
    let limit = Instant::now() + READING;
    while job.node == 0 && heard < all && Instant::now() < limit {
        sleep(Duration::from_millis(5));
        heard = store.add(HEARD, 0)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_are_read_as_they_were_written_and_nonsense_is_not() {
        let failed = |end| News::Failed { node: 2, failure: Failure { rank: 5, end } };
        for news in [
            failed(End::Exit(3)),
            failed(End::Signal { number: 9, core: false }),
            failed(End::Signal { number: 11, core: true }),
            News::Told { node: 1, signal: 2, again: true },
            News::Left,
        ] {
            assert_eq!(News::decode(news.encode().as_bytes()), Some(news));
        }
        for nonsense in ["", "failed", "failed 1 2 exit 0 0", "told 1 9 0", "told x 2 0", "left 1"]
        {
            assert_eq!(News::decode(nonsense.as_bytes()), None, "{nonsense}");
        }
        assert_eq!(News::decode(b"left\xff"), None);
    }

    #[test]
    fn news_name_the_rank_its_node_and_its_end() {
        let failed = |end| News::Failed { node: 2, failure: Failure { rank: 5, end } }.to_string();
        assert_eq!(failed(End::Exit(3)), "rank 5 on node 2 failed with exit code 3");
        let killed = failed(End::Signal { number: 9, core: false });
        assert_eq!(killed, "rank 5 on node 2 was killed by SIGKILL");
    }
}
