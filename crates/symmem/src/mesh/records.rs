//! What the ranks of a world write to the store while they connect: their addresses, what the token is made from, and why they
//! gave up. If the job has a secret, nobody else can write valid records.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::connect::{Bootstrap, OP};
use super::endpoint;
use crate::error::{Error, Result};
use crate::store::{Seal, SharedStore};
use crate::sync::{Deadline, Expiry};

/// How often a waiting rank checks whether another one has given up.
const SLICE: Duration = Duration::from_millis(200);
const VERDICT: &str = "verdict";

/// The address that a rank publishes.
#[derive(Serialize, Deserialize)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) path: PathBuf,
    /// Whether the rank was given a secret of the job.
    pub(super) has_secret: bool,
}

/// An address, or why the rank cannot be reached.
pub(super) type Published = Result<Address, String>;

/// Where a rank listens for ranks of other hosts, or why it does not.
pub(super) type Listening = Result<SocketAddr, String>;

/// Why the ranks could not be connected. The first verdict in the store holds for all.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// The rank that wrote it.
    pub(super) by: usize,
    /// Never empty.
    pub(super) blamed: Vec<usize>,
    pub(super) how: String,
    pub(super) timed_out: bool,
}

impl Verdict {
    /// Of rank `by`: `peer` is gone.
    pub(super) fn lost(by: usize, peer: usize, how: &str) -> Self {
        Self { by, blamed: vec![peer], how: how.to_owned(), timed_out: false }
    }

    /// The error of this rank, `rank`.
    pub(super) fn error(self, rank: usize, deadline: Deadline) -> Error {
        let Self { by, mut blamed, how, timed_out } = self;
        if blamed == [rank] {
            let how =
                if by == rank { how } else { format!("rank {by} gave up on this one: {how}") };
            let what = "a connection to the other ranks".into();
            return Error::Unavailable { what, why: how };
        }
        // All that were missed, and this one is not: it is here.
        blamed.retain(|&blamed| blamed != rank);
        match blamed.first() {
            Some(&rank) if !timed_out => Error::PeerLost { rank, during: OP, how },
            _ => waited_for(blamed, deadline),
        }
    }
}

/// The wait for these ranks has ended.
fn waited_for(ranks: Vec<usize>, deadline: Deadline) -> Error {
    let why = deadline.expiry().unwrap_or(Expiry::Deadline);
    why.error(OP, ranks, deadline.elapsed())
}

/// Why there are no addresses.
pub(super) enum Ended {
    /// This rank, or another before it, gives up.
    Verdict(Verdict),
    Error(Error),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// The keys that were not found in the store, by their index.
struct Awaited<'a> {
    keys: Vec<usize>,
    /// The rank that has to write each key.
    owners: &'a [usize],
    /// When the store said so.
    seen: Option<Instant>,
}

impl Awaited<'_> {
    /// The ranks that have to write the missing keys.
    fn missed(&self) -> Vec<usize> {
        let mut owners: Vec<usize> =
            self.keys.iter().filter_map(|&at| self.owners.get(at).copied()).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    fn is_recent(&self) -> bool {
        self.seen.is_some_and(|seen| seen.elapsed() < 10 * SLICE) && !self.keys.is_empty()
    }
}

pub(super) struct Records {
    rank: usize,
    size: usize,
    store: SharedStore,
    seal: Seal,
    /// What the keys of this world begin with.
    prefix: String,
    deadline: Deadline,
}

impl Records {
    /// Those of the next world. The n-th world of a job on one rank is the n-th on all: each has its own keys.
    pub(super) fn open(bootstrap: &Bootstrap, deadline: Deadline) -> Result<Self> {
        let store = &bootstrap.store;
        let seal = Seal::from_env(&job(&store.describe()))?;
        // A job that torchrun starts again finds the keys of its former life, which may have ended unevenly.
        let life = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let mut records = Self {
            rank: bootstrap.rank,
            size: bootstrap.size,
            store: store.until(deadline).unwrap_or_else(|| store.clone()),
            seal,
            prefix: String::new(),
            deadline,
        };
        let n = records.next_world(&format!("symmem/worlds/{life}/{}", bootstrap.rank))?;
        records.prefix = format!("symmem/world/{life}/{n}");
        Ok(records)
    }

    fn next_world(&self, key: &str) -> Result<i64> {
        if !self.seal.has_secret() {
            return self.store.add(key, 1);
        }
        // The store cannot add to a number that is sealed.
        loop {
            let known = self.store.check(&[key])?;
            let sealed = if known { self.store.get(key, self.deadline)? } else { Vec::new() };
            let n: i64 = if known { self.unseal(key, sealed.clone())? } else { 0 };
            let next = self.seal.close(key, &encode(&(n + 1)));
            if self.store.compare_set(key, &sealed, &next)? == next {
                return Ok(n + 1);
            }
            if self.deadline.expired() {
                return Err(waited_for(vec![self.rank], self.deadline)); // other threads of this rank join all the time
            }
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    fn set(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let key = self.key(name);
        self.store.set(&key, &self.seal.close(&key, &encode(value)))
    }

    /// Of what `rank` writes.
    fn unseal_of<T: for<'a> Deserialize<'a>>(
        &self,
        rank: usize,
        key: &str,
        sealed: Vec<u8>,
    ) -> Result<T> {
        self.unseal(key, sealed).map_err(|e| match e {
            Error::Protocol { with, expected, got } => {
                Error::Protocol { with: format!("rank {rank}, by {with}"), expected, got }
            }
            other => other,
        })
    }

    fn unseal<T: for<'a> Deserialize<'a>>(&self, key: &str, sealed: Vec<u8>) -> Result<T> {
        let with = self.store.describe();
        let value = self.seal.open(key, sealed, &with)?;
        postcard::from_bytes(&value).map_err(|e| Error::Protocol {
            with,
            expected: format!("what a rank writes under {key:?}"),
            got: format!("{} bytes: {e}", value.len()),
        })
    }

    /// Publishes this rank's address, and on the rank that makes it, what the token is made from.
    pub(super) fn publish(&self, published: &Published) -> Result<()> {
        if self.rank == 0 {
            self.set("token", &endpoint::random()?)?;
        }
        self.set(&address_name(self.rank), published)
    }

    /// Publishes where this rank listens for ranks of other hosts.
    pub(super) fn publish_listening(&self, listening: &Listening) -> Result<()> {
        self.set(&listening_name(self.rank), listening)
    }

    /// The token, and every rank's address in rank order; at the deadline, says who did not publish one.
    pub(super) fn gather(&self) -> Result<(u128, Vec<Address>), Ended> {
        let mut keys: Vec<String> = (0..self.size).map(|r| self.key(&address_name(r))).collect();
        keys.push(self.key("token"));
        // The token, behind the addresses, is rank 0's task.
        let owners: Vec<usize> = (0..self.size).chain([0]).collect();
        let mut values = self.collect(&keys, &owners, &|_| None)?;
        let drawn = keys.last().zip(values.pop()).map(|(key, value)| self.unseal_of(0, key, value));
        let drawn = drawn.transpose()?.unwrap_or_default();
        let addresses: Vec<Address> = self.read_all(&keys, values)?;
        // Those that have one find that the others' values are not sealed.
        match addresses.iter().position(|address| address.has_secret && !self.has_secret()) {
            None => Ok((self.seal.token(drawn), addresses)),
            Some(rank) => Err(Ended::Error(Error::Protocol {
                with: format!("rank {rank}"),
                expected:
                    "a secret on every rank or on none, in SYMMEM_SECRET or SYMMEM_SECRET_FILE"
                        .into(),
                got: "one there and none here".into(),
            })),
        }
    }

    pub(super) fn has_secret(&self) -> bool {
        self.seal.has_secret()
    }

    /// The key with which ranks of different hosts prove that they know the job's secret.
    pub(super) fn key_between_hosts(&self) -> Option<[u8; 32]> {
        self.seal.derive("symmem 2026 connections between hosts of a job")
    }

    /// Where every rank listens for ranks of other hosts. `is_gone` is asked now and then of those that have not said so.
    pub(super) fn gather_listening(
        &self,
        is_gone: &dyn Fn(usize) -> Option<Verdict>,
    ) -> Result<Vec<SocketAddr>, Ended> {
        let keys: Vec<String> = (0..self.size).map(|r| self.key(&listening_name(r))).collect();
        let owners: Vec<usize> = (0..self.size).collect();
        let values = self.collect(&keys, &owners, is_gone)?;
        self.read_all(&keys, values)
    }

    /// What every rank published under its key, unless one has published why it cannot.
    fn read_all<T: for<'a> Deserialize<'a>>(
        &self,
        keys: &[String],
        values: Vec<Vec<u8>>,
    ) -> Result<Vec<T>, Ended> {
        let read = |(rank, (key, value)): (usize, (&String, Vec<u8>))| {
            let published: Result<T, String> = self.unseal_of(rank, key, value)?;
            published.map_err(|reason| Error::PeerFailed { op: OP, rank, reason })
        };
        Ok(keys.iter().zip(values).enumerate().map(read).collect::<Result<_>>()?)
    }

    /// The values of these keys, each of which is one rank's task to write.
    fn collect(
        &self,
        keys: &[String],
        owners: &[usize],
        is_gone: &dyn Fn(usize) -> Option<Verdict>,
    ) -> Result<Vec<Vec<u8>>, Ended> {
        let all: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut awaited = Awaited { keys: (0..keys.len()).collect(), owners, seen: None };
        loop {
            let slice = self.deadline.nap(SLICE);
            match self.store.multi_get(&all, Deadline::after(slice)) {
                Ok(values) => return Ok(values),
                Err(Error::Timeout { .. }) => {
                    self.look_around(&all, &mut awaited)?;
                    if let Some(verdict) = awaited.missed().into_iter().find_map(is_gone) {
                        return Err(Ended::Verdict(verdict));
                    }
                }
                Err(Error::Interrupted { .. }) => {
                    return Err(waited_for(awaited.missed(), self.deadline).into());
                }
                // A store that answered a moment ago is not why the others have not come.
                Err(Error::Unavailable { .. }) if awaited.is_recent() => {
                    return Err(self.missed(&awaited));
                }
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Fails if the deadline has passed, or another rank has given up.
    fn look_around(&self, keys: &[&str], awaited: &mut Awaited<'_>) -> Result<(), Ended> {
        if let Some(verdict) = self.verdict()? {
            return Err(Ended::Verdict(verdict));
        }
        // Each time, so that at the end little has to be asked. Once one cannot be asked, the others cannot.
        let mut silent = false;
        awaited.keys.retain(|at| {
            let there = keys.get(*at).filter(|_| !silent).map(|key| self.store.check(&[key]));
            silent |= matches!(there, Some(Err(_)));
            !matches!(there, Some(Ok(true)))
        });
        if !silent {
            awaited.seen = Some(Instant::now());
        }
        if awaited.keys.is_empty() || !self.deadline.expired() {
            return Ok(()); // all came in the last moment, or there is time
        }
        Err(self.missed(awaited))
    }

    /// The verdict at the deadline.
    fn missed(&self, awaited: &Awaited<'_>) -> Ended {
        let blamed = awaited.missed();
        let how = format!("no answer after {:.1?}", self.deadline.elapsed());
        Ended::Verdict(Verdict { by: self.rank, blamed, how, timed_out: true })
    }

    fn verdict(&self) -> Result<Option<Verdict>> {
        let key = self.key(VERDICT);
        if !self.store.check(&[&key])? {
            return Ok(None);
        }
        let sealed = self.store.get(&key, self.deadline)?;
        let verdict: Verdict = self.unseal(&key, sealed)?;
        Ok(Some(verdict).filter(|verdict| self.makes_sense(verdict)))
    }

    /// The first verdict of all: `own`, unless another rank was faster.
    pub(super) fn settle(&self, own: Verdict) -> Verdict {
        let key = self.key(VERDICT);
        let first = self.store.compare_set(&key, &[], &self.seal.close(&key, &encode(&own)));
        let first = first.and_then(|sealed| self.unseal(&key, sealed));
        first.ok().filter(|first| self.makes_sense(first)).unwrap_or(own)
    }

    fn makes_sense(&self, verdict: &Verdict) -> bool {
        let exists = |rank: &usize| *rank < self.size;
        exists(&verdict.by) && !verdict.blamed.is_empty() && verdict.blamed.iter().all(exists)
    }
}

/// Decisions that ranks of several hosts make through the store: the first rank that proposes an answer decides for all.
pub(crate) struct Ballot {
    store: SharedStore,
    seal: Seal,
}

impl Ballot {
    /// With each question answered until `deadline`.
    pub(crate) fn open(store: &SharedStore, deadline: Deadline) -> Result<Self> {
        let seal = Seal::from_env(&job(&store.describe()))?;
        Ok(Self { store: store.until(deadline).unwrap_or_else(|| store.clone()), seal })
    }

    /// `own`, unless another rank was faster.
    pub(crate) fn decide<T>(&self, question: &str, own: &T) -> Result<T>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let key = format!("symmem/decided/{question}");
        let sealed = self.store.compare_set(&key, &[], &self.seal.close(&key, &encode(own)))?;
        let with = self.store.describe();
        let value = self.seal.open(&key, sealed, &with)?;
        postcard::from_bytes(&value).map_err(|e| Error::Protocol {
            with,
            expected: format!("what a rank decided under {key:?}"),
            got: e.to_string(),
        })
    }
}

fn address_name(rank: usize) -> String {
    format!("address/{rank}")
}

fn listening_name(rank: usize) -> String {
    format!("listening/{rank}")
}

/// What distinguishes the jobs of a user: the port of the store. All ranks know it, and nobody else can change it.
fn job(store: &str) -> String {
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    store.rsplit_once(':').map(|(_, port)| digits(port)).unwrap_or_default()
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Fails only for types that cannot be serialised at all.
    postcard::to_stdvec(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_told_apart_by_the_port_of_their_store() {
        assert_eq!(job("store at localhost:29500"), "29500");
        assert_eq!(job("store at [::1]:29501 (rank 0 is its host)"), "29501");
        assert_eq!(job("store at unix:/run/store"), "");
        assert_eq!(job("the store"), "");
    }

    fn verdict(by: usize, blamed: &[usize], timed_out: bool) -> Verdict {
        Verdict { by, blamed: blamed.to_vec(), how: "how".into(), timed_out }
    }

    #[test]
    fn a_verdict_names_the_same_ranks_to_all_and_never_the_one_that_reads_it() {
        let told = |v: Verdict, rank| v.error(rank, Deadline::NEVER).to_string();
        assert_eq!(told(verdict(0, &[2], false), 1), "connect: rank 2 is gone: how");
        assert!(told(verdict(0, &[2], true), 1).starts_with("connect: no answer from rank 2"));
        assert!(told(verdict(0, &[1, 2], true), 1).starts_with("connect: no answer from rank 2"));
        let own = told(verdict(0, &[1], true), 1);
        assert!(own.contains("rank 0 gave up on this one: how"), "{own}");
        assert!(told(verdict(1, &[1], false), 1).ends_with("ranks is not available: how"));
    }
}
