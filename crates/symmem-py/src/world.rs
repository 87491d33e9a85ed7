//! The world: joining and leaving a job.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use symmem::store::{MemoryStore, SharedStore, TcpServer, TcpStore};
use symmem::{Deadline, WorldBuilder};

use crate::error::usage;
use crate::group::{Group, seconds};
use crate::life::Life;
use crate::store::PythonStore;
use crate::wait::detached;

/// All ranks of a job.
#[pyclass(frozen, extends = Group, module = "symmem")]
pub(crate) struct World;

impl World {
    fn build(
        py: Python<'_>,
        join: impl FnOnce() -> symmem::Result<(symmem::World, Option<TcpServer>)> + Send,
    ) -> PyResult<Py<Self>> {
        let (world, server) = detached(py, join)?;
        let inner = symmem::Group::clone(&world);
        let life = Life::new(world, server);
        Py::new(py, PyClassInitializer::from(Group { inner, life }).add_subclass(Self))
    }
}

/// The default time limit for connecting to the store.
const CONNECT_LIMIT: Duration = Duration::from_secs(300);

/// The store of a job, as the caller gives it.
enum StoreGiven {
    Made(SharedStore),
    At(String),
}

impl StoreGiven {
    fn new(given: &Bound<'_, PyAny>) -> Self {
        match given.extract() {
            Ok(address) => Self::At(address),
            Err(_) => Self::Made(Arc::new(PythonStore(given.clone().unbind()))),
        }
    }

    /// The store, and its server if this rank hosts it. Rank 0 does, unless something listens at the address already.
    fn open(
        self,
        rank: usize,
        limit: Duration,
    ) -> symmem::Result<(SharedStore, Option<TcpServer>)> {
        match self {
            Self::Made(store) => Ok((store, None)),
            Self::At(address) => {
                let server = if rank == 0 { TcpServer::bind(&address).ok() } else { None };
                let store = TcpStore::connect(&address, Deadline::within(limit))?;
                Ok((Arc::new(store), server))
            }
        }
    }
}

fn builder(
    py: Python<'_>,
    timeout: Option<f64>,
    signal_pad_size: Option<usize>,
    backend: Option<String>,
) -> PyResult<WorldBuilder> {
    let timeout = timeout.map(|given| seconds(py, given)).transpose()?;
    let mut builder = symmem::World::builder();
    if let Some(timeout) = timeout {
        builder = builder.timeout(timeout);
    }
    if let Some(bytes) = signal_pad_size {
        builder = builder.signal_pad_size(bytes);
    }
    if let Some(backend) = backend {
        builder = builder.backend(backend);
    }
    Ok(builder)
}

#[pymethods]
impl World {
    /// Joins the job that the environment describes, with the variables of `symmem run`, torchrun, Open MPI, PMI or Slurm. Without
    /// any of them it makes a world of one rank. Collective over the job.
    #[staticmethod]
    #[pyo3(signature = (timeout=None, *, signal_pad_size=None, backend=None))]
    fn from_env(
        py: Python<'_>,
        timeout: Option<f64>,
        signal_pad_size: Option<usize>,
        backend: Option<String>,
    ) -> PyResult<Py<Self>> {
        let builder = builder(py, timeout, signal_pad_size, backend)?;
        Self::build(py, || Ok((builder.join_env()?, None)))
    }

    /// Joins a job as the given rank. `store` is an object like `torch.distributed.Store`, or the address of a store ("host:port" or
    /// "unix:PATH"), which rank 0 hosts if nothing listens there. A world of one needs no store. Collective over the job.
    #[staticmethod]
    #[pyo3(signature = (rank, size, *, store=None, timeout=None, signal_pad_size=None, backend=None))]
    fn connect(
        py: Python<'_>,
        rank: usize,
        size: usize,
        store: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        signal_pad_size: Option<usize>,
        backend: Option<String>,
    ) -> PyResult<Py<Self>> {
        let builder = builder(py, timeout, signal_pad_size, backend)?;
        let store = match store {
            Some(store) => StoreGiven::new(store),
            None if size == 1 => StoreGiven::Made(Arc::new(MemoryStore::new())),
            None => return Err(usage(py, "connect", "a store for more than one rank", "None")),
        };
        let limit = timeout.map(|given| seconds(py, given)).transpose()?.unwrap_or(CONNECT_LIMIT);
        Self::build(py, move || {
            let (store, server) = store.open(rank, limit)?;
            Ok((builder.join(rank, size, store)?, server))
        })
    }

    /// This rank's number among the ranks on its machine.
    #[getter]
    fn local_rank(slf: &Bound<'_, Self>) -> usize {
        slf.as_super().get().life.world().local_rank()
    }

    /// Leaves the job. Arrays stay valid; groups and handles of this world refuse further calls.
    fn close(slf: &Bound<'_, Self>) {
        let life = Arc::clone(&slf.as_super().get().life);
        slf.py().detach(|| life.close());
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> Bound<'py, Self> {
        slf.clone()
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        Self::close(slf);
    }

    fn __repr__(slf: &Bound<'_, Self>) -> String {
        let group = &slf.as_super().get().inner;
        format!("symmem.World(rank {} of {})", group.rank(), group.size())
    }
}
