//! Which transport the ranks of a world choose, when it forms: all the same.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[cfg(feature = "ucx")]
use super::ucx::Ucx;
use super::{OverMesh, Transport};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::sync::Deadline;

const VARIABLE: &str = "SYMMEM_WIRE";
const OP: &str = "world";
/// How long a rank that leaves waits for its peers to take in what it has told them.
const LINGER: Duration = Duration::from_secs(1);
/// How long the ranks wait for each other's first messages: so long it takes until the job goes on where a firewall drops them.
const TRIAL: Duration = Duration::from_secs(10);

#[cfg(not(feature = "ucx"))]
enum Ucx {}

/// What the environment asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Wish {
    /// UCX if all ranks have it and an RDMA device for it. Over TCP, the mesh is faster.
    Any,
    Mesh,
    Ucx,
}

impl Wish {
    fn read() -> Result<Self> {
        match std::env::var(VARIABLE).unwrap_or_default().as_str() {
            "" => Ok(Self::Any),
            "mesh" => Ok(Self::Mesh),
            "ucx" => Ok(Self::Ucx),
            other => Err(Error::Usage {
                op: OP,
                rank: None,
                expected: format!("{VARIABLE} to be ucx or mesh, or not set"),
                got: format!("{other:?}"),
            }),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Any => "not set",
            Self::Mesh => "mesh",
            Self::Ucx => "ucx",
        }
    }
}

/// What a rank brings when a world of several hosts forms.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    wish: Wish,
    /// Whether UCX could use an RDMA device of its host.
    has_adapter: bool,
    /// Its engine, or why there is none.
    engine: Result<Card, String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    version: String,
    address: Vec<u8>,
}

impl Card {
    /// What must be equal: releases of one version understand each other.
    fn line(&self) -> &str {
        self.version.rsplit_once('.').map_or(self.version.as_str(), |(line, _)| line)
    }
}

/// This rank's part in the choice, and what was chosen.
#[derive(Default)]
pub(crate) struct Choice {
    offer: Option<Offer>,
    engine: Mutex<Option<Arc<Ucx>>>,
    cards: Mutex<Vec<Card>>,
    chosen: OnceLock<Arc<dyn Transport>>,
}

impl Choice {
    /// Makes this rank's offer. In a world of one host there is none.
    pub(crate) fn prepare(mesh: &Mesh) -> Result<Self> {
        if mesh.hosts().count() < 2 {
            return Ok(Self::default());
        }
        let wish = match Wish::read()? {
            // UCX encrypts nothing, and believes whoever reaches its ports: who has a secret has to ask for that.
            Wish::Any if mesh.is_sealed() => Wish::Mesh,
            wish => wish,
        };
        let has_adapter = has_adapter(mesh);
        let engine = match wish {
            Wish::Mesh => Err("it was not asked for".to_owned()),
            Wish::Any if !has_adapter => Err("no RDMA device".to_owned()),
            Wish::Any | Wish::Ucx => start(mesh),
        };
        let card = engine.as_ref().map(|engine| card(engine)).map_err(Clone::clone);
        let engine = Mutex::new(engine.ok());
        Ok(Self {
            offer: Some(Offer { wish, has_adapter, engine: card }),
            engine,
            ..Self::default()
        })
    }

    pub(crate) fn offer(&self) -> Option<&Offer> {
        self.offer.as_ref()
    }

    /// Chooses, by what all ranks of the world have brought. True if they are to try UCX together: see `connect`.
    pub(crate) fn settle(&self, mesh: &Mesh, offers: &[Option<Offer>]) -> Result<bool> {
        let Some(own) = &self.offer else { return Ok(false) };
        match agree(own, offers) {
            Ok(cards) => {
                *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = cards;
                Ok(true)
            }
            Err(Refusal::Error(error)) => Err(error),
            Err(Refusal::Without(why)) => {
                if offers.iter().flatten().any(|offer| offer.has_adapter) {
                    self.warn(mesh, &why);
                }
                self.go_without(mesh);
                Ok(false)
            }
        }
    }

    /// Connects with all ranks of other hosts, and waits until they answer. Where this fails on any rank, all go without, if
    /// they may.
    pub(crate) fn connect(&self, mesh: &Mesh, deadline: Deadline) -> Result<()> {
        let cards = std::mem::take(&mut *self.cards.lock().unwrap_or_else(PoisonError::into_inner));
        let Some(engine) = self.engine().clone() else { return Ok(()) };
        let limit = Deadline::after(deadline.nap(TRIAL));
        connect(&engine, mesh, &cards, limit).map_err(|why| Error::Unavailable {
            what: "UCX between the hosts".to_owned(),
            why: format!("{why}; with {VARIABLE}=mesh ranks do without it"),
        })
    }

    /// Whether the ranks may do without UCX.
    pub(crate) fn is_optional(&self) -> bool {
        self.offer.as_ref().is_none_or(|offer| offer.wish != Wish::Ucx)
    }

    /// All ranks have connected.
    pub(crate) fn go_with(&self) {
        if let Some(engine) = self.engine().clone() {
            let _ = self.chosen.set(transport(engine));
        }
    }

    /// Says why RDMA devices are not used.
    pub(crate) fn warn(&self, mesh: &Mesh, why: &str) {
        if mesh.rank() == 0 && self.offer.as_ref().is_some_and(|offer| offer.wish == Wish::Any) {
            tracing::warn!(
                "hosts have RDMA devices, but messages between hosts go over TCP: {why}"
            );
        }
    }

    /// All ranks use the mesh.
    pub(crate) fn go_without(&self, mesh: &Mesh) {
        mesh.carry(None);
        self.end();
        let _ = self.chosen.set(Arc::new(OverMesh::new(mesh)));
    }

    /// What was chosen, once the world has formed.
    pub(crate) fn chosen(&self) -> Option<&Arc<dyn Transport>> {
        self.chosen.get()
    }

    /// Before this rank says goodbye: what it has told comes first.
    pub(crate) fn finish(&self) {
        #[cfg(feature = "ucx")]
        if let Some(engine) = self.chosen().and_then(|_| self.engine().clone()) {
            engine.finish(Deadline::after(LINGER));
        }
    }

    /// After the goodbye.
    pub(crate) fn end(&self) {
        #[cfg(feature = "ucx")]
        if let Some(engine) = self.engine().take() {
            engine.end();
        }
    }

    fn engine(&self) -> MutexGuard<'_, Option<Arc<Ucx>>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Refusal {
    /// Go on without UCX, for this reason.
    Without(String),
    Error(Error),
}

/// All ranks' engines, if all are to use them. All ranks come to the same verdict.
fn agree(own: &Offer, offers: &[Option<Offer>]) -> Result<Vec<Card>, Refusal> {
    let offers: Vec<(usize, &Offer)> = offers
        .iter()
        .enumerate()
        .filter_map(|(rank, offer)| Some((rank, offer.as_ref()?)))
        .collect();
    if let Some((rank, other)) = offers.iter().find(|(_, other)| other.wish != own.wish) {
        let (ours, theirs) = (own.wish.text().to_owned(), other.wish.text().to_owned());
        return Err(Refusal::Error(Error::Mismatch {
            op: OP,
            what: VARIABLE,
            rank: *rank,
            ours,
            theirs,
        }));
    }
    let mut cards: Vec<Card> = Vec::with_capacity(offers.len());
    for (rank, offer) in offers {
        match (&offer.engine, own.wish) {
            (Ok(card), _) => cards.push(card.clone()),
            (Err(why), Wish::Ucx) => {
                let what = format!("UCX on rank {rank}, for {VARIABLE}=ucx");
                return Err(Refusal::Error(Error::Unavailable { what, why: why.clone() }));
            }
            (Err(why), _) => return Err(Refusal::Without(format!("rank {rank} has none, {why}"))),
        }
    }
    let ours = own.engine.as_ref().map(Card::line).unwrap_or_default();
    let other = cards.iter().enumerate().find(|(_, card)| card.line() != ours);
    let Some((rank, other)) = other else { return Ok(cards) };
    let version = own.engine.as_ref().map(|card| card.version.clone()).unwrap_or_default();
    let theirs = other.version.clone();
    Err(match own.wish {
        Wish::Ucx => {
            let what = "version of UCX";
            Refusal::Error(Error::Mismatch { op: OP, what, rank, ours: version, theirs })
        }
        _ => Refusal::Without(format!("rank {rank} has version {theirs}, this one {version}")),
    })
}

#[cfg(feature = "ucx")]
fn has_adapter(mesh: &Mesh) -> bool {
    super::devices::has_adapter(mesh.address_between_hosts())
}

#[cfg(not(feature = "ucx"))]
fn has_adapter(_mesh: &Mesh) -> bool {
    false
}

#[cfg(feature = "ucx")]
fn card(engine: &Ucx) -> Card {
    Card { version: engine.version(), address: engine.address().to_vec() }
}

/// An engine over UCX, for the ranks of other hosts.
#[cfg(feature = "ucx")]
fn start(mesh: &Mesh) -> Result<Arc<Ucx>, String> {
    use symmem_sys::ucx::{self, Engine, Settings};

    let library = ucx::load().map_err(|missing| missing.to_string())?;
    let devices = super::devices::of_address(mesh.address_between_hosts(), library.version());
    let settings = Settings { devices, ..Settings::default() };
    let inbox = mesh.listeners();
    let tell = move |from: usize, group: u128, bytes: &[u8]| inbox.tell(from, group, bytes);
    let ranks = (mesh.rank(), mesh.size());
    let is_far = |rank: usize| !mesh.is_local(rank);
    let engine = Ucx::new(ranks, is_far, mesh.tag(), Box::new(tell), |events| {
        let worker = library.start(&settings, events).map_err(|failure| failure.to_string())?;
        let worker: Arc<dyn Engine> = Arc::new(worker);
        Ok(worker)
    });
    engine.map(Arc::new)
}

/// Connects with all ranks of other hosts. From here on the mesh's watcher looks after the engine.
#[cfg(feature = "ucx")]
fn connect(
    engine: &Arc<Ucx>,
    mesh: &Mesh,
    cards: &[Card],
    deadline: Deadline,
) -> Result<(), String> {
    let observer: std::sync::Weak<Ucx> = Arc::downgrade(engine);
    mesh.watch(observer);
    mesh.carry(Some(engine.clone()));
    for (rank, card) in cards.iter().enumerate().filter(|(rank, _)| !mesh.is_local(*rank)) {
        engine.connect(rank, &card.address).map_err(|why| format!("rank {rank}: {why}"))?;
    }
    engine.try_all(deadline)
}

#[cfg(feature = "ucx")]
fn transport(engine: Arc<Ucx>) -> Arc<dyn Transport> {
    engine
}

#[cfg(not(feature = "ucx"))]
fn card(engine: &Ucx) -> Card {
    match *engine {}
}

#[cfg(not(feature = "ucx"))]
fn start(_mesh: &Mesh) -> Result<Arc<Ucx>, String> {
    Err("symmem was built without the feature ucx".to_owned())
}

#[cfg(not(feature = "ucx"))]
fn connect(engine: &Arc<Ucx>, _: &Mesh, _: &[Card], _: Deadline) -> Result<(), String> {
    match **engine {}
}

#[cfg(not(feature = "ucx"))]
fn transport(engine: Arc<Ucx>) -> Arc<dyn Transport> {
    match *engine {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(wish: Wish, engine: Result<&str, &str>) -> Option<Offer> {
        let card = |version: &str| Card { version: version.to_owned(), address: vec![] };
        Some(Offer { wish, has_adapter: true, engine: engine.map(card).map_err(str::to_owned) })
    }

    /// What the first of these ranks finds, and the second.
    fn verdicts(wish: Wish, engines: [Result<&str, &str>; 2]) -> [String; 2] {
        let offers = engines.map(|engine| offer(wish, engine));
        [0, 1].map(|rank| match agree(offers[rank].as_ref().unwrap(), &offers) {
            Ok(cards) => format!("{} engines", cards.len()),
            Err(Refusal::Without(why)) => format!("without: {why}"),
            Err(Refusal::Error(error)) => error.to_string(),
        })
    }

    #[test]
    fn engines_of_one_version_are_used() {
        for wish in [Wish::Any, Wish::Ucx] {
            assert_eq!(verdicts(wish, [Ok("1.13.0"), Ok("1.13.1")]), ["2 engines"; 2]);
        }
    }

    #[test]
    fn a_rank_without_an_engine_is_named() {
        let engines = [Ok("1.13.0"), Err("no library")];
        assert_eq!(verdicts(Wish::Any, engines), ["without: rank 1 has none, no library"; 2]);
        for error in verdicts(Wish::Ucx, engines) {
            assert!(error.contains("UCX on rank 1") && error.contains("no library"), "{error}");
        }
        let engines = [Err("it was not asked for"); 2];
        assert!(verdicts(Wish::Mesh, engines).iter().all(|verdict| verdict.starts_with("without")));
    }

    #[test]
    fn two_versions_are_used_by_nobody() {
        let engines = [Ok("1.13.1"), Ok("1.20.0")];
        assert!(verdicts(Wish::Any, engines).iter().all(|verdict| verdict.starts_with("without")));
        let [ours, theirs] = verdicts(Wish::Ucx, engines);
        assert!(ours.contains("here 1.13.1, on rank 1 1.20.0"), "{ours}");
        assert!(theirs.contains("here 1.20.0, on rank 0 1.13.1"), "{theirs}");
    }

    #[test]
    fn different_wishes_are_told() {
        let offers = [offer(Wish::Ucx, Ok("1.13.1")), offer(Wish::Any, Ok("1.13.1"))];
        let Err(Refusal::Error(error)) = agree(offers[0].as_ref().unwrap(), &offers) else {
            panic!("agreed");
        };
        assert!(error.to_string().contains("SYMMEM_WIRE: here ucx, on rank 1 not set"), "{error}");
    }
}
