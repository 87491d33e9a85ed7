//! The world: how a job is joined and left.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use symmem::store::{MemoryStore, SharedStore, TcpServer, TcpStore};
use symmem::{Deadline, WorldBuilder};

use crate::error::usage;
use crate::group::{Group, Life, seconds};
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

/// How long the store may take to be there, unless the caller says otherwise.
const CONNECT_LIMIT: Duration = Duration::from_secs(300);

/// How a caller names the store of a job.
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

    /// The store, and its server where this rank hosts it: rank 0 does unless somebody listens there already.
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
    /// Joins the job that the environment describes: `symmem run`'s and torchrun's variables, Open MPI's, PMI's or
    /// Slurm's; without any, a world of one. Collective over the job.
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

    /// Joins a job as the given rank. `store` is the address of a store ("host:port" or "unix:PATH", which rank 0 hosts
    /// unless somebody does), or an object like `torch.distributed.Store`; a world of one needs none. Collective over the
    /// job.
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

    /// This rank's number among those on its machine.
    #[getter]
    fn local_rank(slf: &Bound<'_, Self>) -> usize {
        slf.as_super().get().life.world().local_rank()
    }

    /// Leaves the job in order. Arrays live on; groups and handles of this world cannot be used any more.
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
