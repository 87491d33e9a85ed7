//! The world: all ranks of a job, and how a rank joins it.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Group;
use super::context::{Context, DeviceRules};
use super::environment::{self, Assignment};
use super::form::{Spec, WORLD};
use crate::dtype::Order;
use crate::error::{Error, Failed, Result};
use crate::memory::{Backend, by_name};
use crate::mesh::{Bootstrap, Mesh, connect};
use crate::store::{MemoryStore, SharedStore, TcpServer, TcpStore};
use crate::sync::Deadline;

pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// All ranks of a job: a [`Group`] like any other, to which it dereferences.
#[derive(Clone, Debug)]
#[must_use = "dropping the world leaves it"]
pub struct World {
    group: Group,
    local_rank: usize,
}

impl Deref for World {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}

impl World {
    /// Sets how to join a job.
    pub fn builder() -> WorldBuilder {
        WorldBuilder::default()
    }

    /// Joins the job that the environment describes: torchrun's variables (which `symmem run` sets too), Open MPI's,
    /// PMI's or Slurm's; without any, a world of one. Collective over the job.
    ///
    /// ```
    /// let world = symmem::World::from_env()?; // alone: a world of one
    /// println!("rank {} of {}", world.rank(), world.size());
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn from_env() -> Result<Self> {
        Self::builder().join_env()
    }

    /// Runs `n` ranks as threads of this process and returns what each gave back, in rank order.
    ///
    /// ```
    /// let sums = symmem::World::threads(4, |world| {
    ///     let mut sum = [world.rank()];
    ///     world.all_reduce(&mut sum, symmem::ReduceOp::Sum).map(|()| sum[0])
    /// })?;
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 6)));
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn threads<R: Send>(n: usize, f: impl Fn(World) -> R + Sync) -> Result<Vec<R>> {
        Self::builder().threads(n, f)
    }

    /// This rank's number among those on its machine, as the launcher says.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Leaves the job in order now. Fails, and gives the world back, while groups, queues, memory or other values of it are alive:
    /// peers may write to the memory of a rank that has left.
    ///
    /// ```
    /// let world = symmem::World::from_env()?;
    /// let x = world.alloc::<u8>(16)?.rendezvous(&world)?;
    /// let world = world.leave().unwrap_err().kept; // memory of it is still alive
    /// drop(x);
    /// world.leave()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn leave(self) -> Result<(), Failed<Self>> {
        if self.group.is_last() {
            return Ok(()); // dropping it says goodbye
        }
        let expected = "a world of which no group, queue, memory or clone is alive".to_owned();
        let error = self.usage("leave", expected, "one that is in use".to_owned());
        Err(Failed { error, kept: self })
    }

    /// Leaves the job even if values of the world are still alive. Do not use its groups afterwards: this rank no longer notices
    /// the loss of peers, so their waits may last until the deadline.
    ///
    /// # Safety
    /// Nothing on this rank touches symmetric memory of this world any more, and no slice of it is alive: peers go on
    /// without this rank, and may write.
    #[allow(unsafe_code)] // S2: for callers whose language has no owners
    pub unsafe fn leave_unchecked(&self) {
        self.context().leave("it left", None);
    }
}

impl Group {
    /// Waits until all ranks of the job have joined; tells them if this one gives up.
    fn join_by(&self, deadline: Deadline) -> Result<()> {
        self.ready_by(deadline).inspect_err(|e| {
            // Who waits for the same rank, and a little longer, shall blame that one and not us.
            let blamed = match e {
                Error::Timeout { waiting_for, .. } => waiting_for.first().copied(),
                Error::PeerLost { rank, .. } => Some(*rank), // a peer may have said so, and we not noticed
                _ => None,
            };
            self.context().leave(&e.to_string(), blamed);
        })
    }
}

/// Settings for joining a world: see [`World::builder`]. Those that are not given come from the environment.
///
/// ```
/// use std::time::Duration;
/// use symmem::World;
///
/// let ranks = World::builder().timeout(Duration::from_secs(10)).threads(2, |world| world.rank())?;
/// assert_eq!(ranks, [0, 1]);
/// # Ok::<(), symmem::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until a world is joined"]
pub struct WorldBuilder {
    backend: Option<String>,
    timeout: Option<Duration>,
    signal_pad_size: Option<usize>,
    socket_dir: Option<PathBuf>,
    strict_devices: Option<bool>,
    ranks_per_device: Option<usize>,
}

impl WorldBuilder {
    /// The backend of symmetric memory on the host. Default: `SYMMEM_BACKEND`, or `host` between processes and `process`
    /// between threads.
    pub fn backend(self, name: impl Into<String>) -> Self {
        Self { backend: Some(name.into()), ..self }
    }

    /// The time limit of calls without a deadline of their own; zero means no limit. Default: `SYMMEM_TIMEOUT` seconds, or
    /// 5 minutes.
    pub fn timeout(self, limit: Duration) -> Self {
        Self { timeout: Some(limit), ..self }
    }

    /// Bytes of a signal pad. Default: `SYMMEM_SIGNAL_PAD_SIZE`, or the process's setting.
    pub fn signal_pad_size(self, bytes: usize) -> Self {
        Self { signal_pad_size: Some(bytes), ..self }
    }

    /// A directory in which the ranks of one machine find each other's sockets; needed when ranks run in containers that
    /// share nothing else. Default: `SYMMEM_SOCKET_DIR`, or a private one.
    pub fn socket_dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { socket_dir: Some(dir.into()), ..self }
    }

    /// Forbids ranks of a group to share a device: if any rank sets this, a rendezvous on a shared device fails on all ranks.
    /// Default: whether `SYMMEM_STRICT_DEVICES` is 1.
    pub fn strict_devices(self, strict: bool) -> Self {
        Self { strict_devices: Some(strict), ..self }
    }

    /// How many ranks use a device at the same time, whose kernels must fit on it together. If ranks of a group give different
    /// numbers, the largest counts. Default: `SYMMEM_RANKS_PER_DEVICE`. If that is not set: for groups whose ranks share a device, the
    /// number of ranks of the world or of the job on this machine (`LOCAL_WORLD_SIZE`). For other groups 2, so that a rank with
    /// a device of its own uses at most half of it.
    pub fn ranks_per_device(self, ranks: usize) -> Self {
        Self { ranks_per_device: Some(ranks), ..self }
    }

    /// See [`World::from_env`].
    pub fn join_env(self) -> Result<World> {
        let assignment = environment::read(&|name| std::env::var(name).ok())?;
        let Some(address) = assignment.store.as_deref().filter(|_| assignment.size > 1) else {
            let store = Arc::new(MemoryStore::new());
            return self.build(Mesh::alone(), store, None, assignment.local_rank, Deadline::NEVER);
        };
        let deadline = self.deadline()?.start();
        let (store, server) = join_store(address, &assignment, deadline)?;
        self.connect(
            assignment.rank,
            assignment.size,
            store,
            server,
            assignment.local_rank,
            deadline,
        )
    }

    /// Joins a job as the given rank, through a store that all its ranks reach. Collective over the job.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use symmem::World;
    /// use symmem::store::{MemoryStore, SharedStore};
    ///
    /// let store: SharedStore = Arc::new(MemoryStore::new());
    /// let world = World::builder().join(0, 1, store)?;
    /// assert_eq!(world.size(), 1);
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn join(self, rank: usize, size: usize, store: SharedStore) -> Result<World> {
        if rank >= size {
            return Err(Error::Usage {
                op: "join",
                rank: None,
                expected: format!("a rank below the world size {size}"),
                got: rank.to_string(),
            });
        }
        let deadline = self.deadline()?.start();
        self.connect(rank, size, store, None, rank, deadline)
    }

    /// See [`World::threads`].
    pub fn threads<R: Send>(self, n: usize, f: impl Fn(World) -> R + Sync) -> Result<Vec<R>> {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let (f, options) = (&f, &self);
        let run = |mesh: Mesh, store: SharedStore| {
            let rank = mesh.rank();
            options.clone().build(mesh, store, None, rank, options.deadline()?).map(f)
        };
        std::thread::scope(|scope| {
            let start = |mesh: Mesh| {
                let (run, store) = (&run, Arc::clone(&store));
                // Where no thread can be had, the mesh is dropped with its turn: the others must not wait for it.
                let rank = Unstarted(Some(mesh));
                std::thread::Builder::new()
                    .spawn_scoped(scope, move || run(rank.start(), store))
                    .map_err(Error::system("starting a rank as a thread"))
            };
            let threads: Result<Vec<_>> = Mesh::threads(n).into_iter().map(start).collect();
            let threads = threads?;
            // A panic of a rank is the caller's own: it goes on where the caller waits.
            let join = |t: std::thread::ScopedJoinHandle<'_, Result<R>>| {
                t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }

    fn connect(
        self,
        rank: usize,
        size: usize,
        store: SharedStore,
        server: Option<TcpServer>,
        local_rank: usize,
        deadline: Deadline,
    ) -> Result<World> {
        let shared = std::env::var_os("SYMMEM_SOCKET_DIR").filter(|v| !v.is_empty());
        let mesh = connect(&Bootstrap {
            rank,
            size,
            store: Arc::clone(&store),
            socket_dir: self.socket_dir.clone().or(shared.map(PathBuf::from)),
            deadline,
        })?;
        self.build(mesh, store, server, local_rank, deadline)
    }

    fn build(
        self,
        mesh: Mesh,
        store: SharedStore,
        server: Option<TcpServer>,
        local_rank: usize,
        deadline: Deadline,
    ) -> Result<World> {
        let limit = self.deadline()?;
        let pad_size = match self.signal_pad_size {
            Some(bytes) => Some(bytes),
            None => setting::<usize>("SYMMEM_SIGNAL_PAD_SIZE", "bytes")?,
        };
        let backend = self.find_backend(&mesh)?;
        let strict = match self.strict_devices {
            Some(strict) => strict,
            None => setting::<u8>("SYMMEM_STRICT_DEVICES", "(0 or 1)")?.is_some_and(|set| set > 0),
        };
        let ranks = match self.ranks_per_device {
            Some(ranks) => Some(ranks),
            None => setting::<usize>("SYMMEM_RANKS_PER_DEVICE", "(a number of ranks)")?,
        };
        if ranks == Some(0) {
            let expected = "a number of ranks per device of at least 1".to_owned();
            return Err(Error::Usage { op: "world", rank: None, expected, got: "0".into() });
        }
        // A library's world may be of some ranks of a job only, as those of torch's groups are.
        let of_job = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
        let ranks_here = mesh.ranks_here().max(of_job.unwrap_or(0));
        let devices = DeviceRules { strict, ranks, ranks_here };
        let context = Context::new(mesh, store, backend, pad_size, devices, server)?;
        let context = Arc::new(context);
        let spec = Spec {
            op: WORLD,
            scope: String::new(),
            label: "world".into(),
            _claim: Some(context.claim_name("world".into())?),
            members: (0..context.mesh.size()).collect(),
            pad_size: context.pad_size(),
            limit,
            order: Order::Ranked,
            root: None,
        };
        let group = Group::begin(&context, spec)?;
        group.join_by(deadline)?;
        Ok(World { group, local_rank })
    }

    fn find_backend(&self, mesh: &Mesh) -> Result<Arc<dyn Backend>> {
        let fitting = if mesh.in_one_process() { "process" } else { "host" };
        let set = setting::<String>("SYMMEM_BACKEND", "")?;
        let name = self.backend.as_deref().or(set.as_deref()).unwrap_or(fitting);
        let backend = by_name(name)?;
        backend.probe()?;
        Ok(backend)
    }

    pub(crate) fn deadline(&self) -> Result<Deadline> {
        let seconds = setting::<f64>("SYMMEM_TIMEOUT", "seconds")?;
        let set = seconds.map(|s| Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX));
        Ok(Deadline::within(self.timeout.or(set).unwrap_or(DEFAULT_TIMEOUT)))
    }
}

/// A rank that has no thread yet.
struct Unstarted(Option<Mesh>);

impl Unstarted {
    fn start(mut self) -> Mesh {
        self.0.take().unwrap_or_else(Mesh::alone)
    }
}

impl Drop for Unstarted {
    fn drop(&mut self) {
        if let Some(mesh) = &self.0 {
            mesh.leave("it could not be started", None);
        }
    }
}

/// A number from the environment.
pub(crate) fn setting<T: std::str::FromStr + PartialOrd + Default>(
    name: &str,
    unit: &str,
) -> Result<Option<T>> {
    let Some(text) = std::env::var(name).ok().filter(|t| !t.is_empty()) else { return Ok(None) };
    match text.parse::<T>() {
        Ok(value) if value >= T::default() => Ok(Some(value)),
        _ => Err(Error::Usage {
            op: "World::from_env",
            rank: None,
            expected: format!("a number of {unit} in {name}"),
            got: format!("{text:?}"),
        }),
    }
}

/// The stores that this process hosts, until it ends.
static HOSTED: Mutex<Vec<TcpServer>> = Mutex::new(Vec::new());

/// The job's store: the launcher's, or our own if we are rank 0 and nobody else listens at the address.
fn join_store(
    address: &str,
    assignment: &Assignment,
    deadline: Deadline,
) -> Result<(SharedStore, Option<TcpServer>)> {
    let mut server = None;
    if assignment.rank == 0 && !assignment.store_is_hosted {
        match TcpServer::bind_by(address, deadline) {
            // Later worlds of the job find the store where they expect it; a socket file must not outlive its world.
            Ok(bound) if bound.local_addr().is_some() => {
                HOSTED.lock().unwrap_or_else(PoisonError::into_inner).push(bound);
            }
            Ok(bound) => server = Some(bound),
            Err(Error::System { source, .. }) if source.kind() == std::io::ErrorKind::AddrInUse => {
                tracing::debug!("a store listens at {address} already");
            }
            Err(e) => return Err(e),
        }
    }
    let host = if assignment.store_is_hosted { "" } else { " (rank 0 is its host)" };
    let store = TcpStore::connect_as(address, format!("store at {address}{host}"), deadline)?;
    // What waits without a deadline of its own waits no longer than anything else in this world.
    let limit = deadline.remaining().map(|left| left.saturating_add(deadline.elapsed()));
    Ok((Arc::new(store.with_limit(limit.unwrap_or(Duration::ZERO))), server))
}
