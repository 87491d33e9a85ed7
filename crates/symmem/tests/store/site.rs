//! Where a test finds its store: a fresh one, and as many handles to it as there are ranks.

use std::sync::Arc;
use std::time::Duration;

use symmem::store::{MemoryStore, PrefixStore, SharedStore, TcpServer, TcpStore};
use symmem::{Deadline, Error, Result};

/// Only against hangs; no test waits this long.
pub const LONG: Deadline = Deadline::within(Duration::from_secs(60));

/// For waits that are meant to end without success.
pub const SHORT: Deadline = Deadline::within(Duration::from_millis(30));

pub struct Site {
    open: Box<dyn Fn() -> SharedStore + Send + Sync>,
}

impl Site {
    /// A handle to the site's store, as one more rank would get it.
    pub fn open(&self) -> SharedStore {
        (self.open)()
    }
}

pub fn memory() -> Site {
    let store: SharedStore = Arc::new(MemoryStore::new());
    Site { open: Box::new(move || Arc::clone(&store)) }
}

pub fn tcp() -> Site {
    let server = server();
    Site { open: Box::new(move || Arc::new(client(&server))) }
}

pub fn unix() -> Site {
    // Each test runs on a thread of its own, named after it.
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    let path = std::env::temp_dir().join(format!("{test}-{}", std::process::id()));
    let address = format!("unix:{}", path.display());
    let server = TcpServer::bind(&address).expect("a server at a path");
    let open = move || -> SharedStore {
        let _keep = &server;
        Arc::new(TcpStore::connect(&address, LONG).expect("a client of it"))
    };
    Site { open: Box::new(open) }
}

pub fn prefixed(inner: Site) -> Site {
    Site { open: Box::new(move || Arc::new(PrefixStore::new("some/prefix", inner.open()))) }
}

pub fn server() -> TcpServer {
    TcpServer::bind("127.0.0.1:0").expect("a server on any port")
}

pub fn client(server: &TcpServer) -> TcpStore {
    TcpStore::connect(&server.local_addr().unwrap().to_string(), LONG).expect("a client of it")
}

/// Makes a call with a short deadline, again if the server had no time to answer: a client that was not heard has changed nothing,
/// and on a busy machine it may take longer than the call may.
pub fn heard<T>(call: impl Fn() -> Result<T>) -> Result<T> {
    let unheard = |result: &Result<T>| matches!(result, Err(Error::Unavailable { .. }));
    (0..50).map(|_| call()).find(|result| !unheard(result)).unwrap_or_else(call)
}

/// Runs `f` for each handle at once.
pub fn on_threads(stores: &[SharedStore], f: impl Fn(usize, &SharedStore) + Sync) {
    std::thread::scope(|scope| {
        for (rank, store) in stores.iter().enumerate() {
            let f = &f;
            scope.spawn(move || f(rank, store));
        }
    });
}
