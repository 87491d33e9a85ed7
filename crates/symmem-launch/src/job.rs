//! What to launch, and the variables that tell each rank its place.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use symmem::store::TcpServer;

use super::Secret;

/// How long ranks may take to end, unless the user says otherwise.
pub const GRACE: Duration = Duration::from_secs(5);

/// What becomes of the other ranks when one fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnFailure {
    /// End them. The exit status is that of the rank that failed
    Kill,
    /// Let them continue. The exit status is 0 if all of them exit with 0, except the first that failed and those killed by a signal
    Keep,
}

/// Settings of UCX that must be there before it is loaded: it must not patch `mmap` and its like, install signal handlers, or write
/// its warnings to standard output.
const UCX: [(&str, &str); 3] =
    [("UCX_MEM_EVENTS", "n"), ("UCX_HANDLE_ERRORS", "none"), ("UCX_LOG_FILE", "stderr")];

/// A program to run as several ranks.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Ranks on this node.
    pub ranks: usize,
    /// How many nodes take part, with as many ranks each.
    pub nodes: usize,
    /// Which of them this is.
    pub node: usize,
    /// Where the store is: on node 0. Without it, on this machine, out of reach for others.
    pub master_addr: Option<String>,
    /// The store's port. Without it, a free one.
    pub master_port: Option<u16>,
    /// How long ranks may take to end after they were told to.
    pub grace: Duration,
    /// What becomes of the other ranks when one fails.
    pub on_failure: OnFailure,
    /// With what ranks seal what they write to the store. [`Job::new`] makes one, of which other nodes do not know.
    pub secret: Secret,
    /// Whether standard output is collected for [`Outcome::stdout`](super::Outcome::stdout) instead of shown.
    pub collect: bool,
}

impl Job {
    /// A job of `ranks` ranks on this machine.
    pub fn new(command: Vec<OsString>, ranks: usize) -> Self {
        Self {
            command,
            ranks,
            nodes: 1,
            node: 0,
            master_addr: None,
            master_port: None,
            grace: GRACE,
            on_failure: OnFailure::Kill,
            secret: Secret::own(),
            collect: false,
        }
    }

    /// The rank of this node's `local`th rank in the world.
    pub(super) fn rank(&self, local: usize) -> usize {
        self.node * self.ranks + local
    }

    /// The command of this node's `local`th rank.
    pub(super) fn command(&self, local: usize, store: &StoreAddress) -> Result<Command> {
        let (program, args) = self.command.split_first().context("no program to run")?;
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os().filter(|(name, _)| contradicts(name)) {
            command.env_remove(name);
        }
        if std::env::var_os("PYTHONUNBUFFERED").is_none() {
            // Else Python holds its lines back, because it writes to a pipe.
            command.env("PYTHONUNBUFFERED", "1");
        }
        command.envs(self.variables(local, store));
        for (name, value) in UCX {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        self.secret.tell(&mut command);
        Ok(command)
    }

    /// What torchrun would set.
    fn variables(&self, local: usize, store: &StoreAddress) -> [(&'static str, String); 15] {
        let rank = self.rank(local).to_string();
        let world = (self.ranks * self.nodes).to_string();
        [
            ("RANK", rank.clone()),
            ("LOCAL_RANK", local.to_string()),
            ("WORLD_SIZE", world.clone()),
            ("LOCAL_WORLD_SIZE", self.ranks.to_string()),
            ("GROUP_RANK", self.node.to_string()),
            ("GROUP_WORLD_SIZE", self.nodes.to_string()),
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", world),
            ("MASTER_ADDR", store.host.clone()),
            ("MASTER_PORT", store.port.to_string()),
            // The launcher hosts the store, so rank 0 must not try to.
            ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
            ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
            ("TORCHELASTIC_MAX_RESTARTS", "0".to_owned()),
            // Every node comes to the same one without asking.
            ("TORCHELASTIC_RUN_ID", format!("symmem-{}-{}", store.host, store.port)),
        ]
    }

    /// Starts the store where it is this node's task, and says where it is.
    pub(super) fn host_store(&self) -> Result<(StoreAddress, Option<TcpServer>)> {
        ensure!(self.node < self.nodes, "node rank {} is not below {}", self.node, self.nodes);
        if self.nodes == 1 {
            let host = self.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_owned());
            let server = bind(&host, self.master_port.unwrap_or(0))?;
            let port = server.local_addr().map_or(0, |address| address.port());
            return Ok((StoreAddress { host, port }, Some(server)));
        }
        let needs = "with more than one node the ranks need a store that all can reach";
        let host =
            self.master_addr.clone().with_context(|| format!("{needs}: give --master-addr"))?;
        let port = self.master_port.with_context(|| format!("{needs}: give --master-port"))?;
        // Others may know this node under an address that it does not know itself.
        let bind_all = || bind("::", port).or_else(|_| bind("0.0.0.0", port));
        let server = (self.node == 0).then(bind_all).transpose()?;
        Ok((StoreAddress { host, port }, server))
    }
}

/// Where the ranks find the store.
#[derive(Clone, Debug)]
pub(super) struct StoreAddress {
    host: String,
    port: u16,
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.parse() {
            Ok(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port),
            _ => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

fn bind(host: &str, port: u16) -> Result<TcpServer> {
    let address = StoreAddress { host: host.to_owned(), port };
    Ok(TcpServer::bind(&address.to_string())?)
}

/// Whether a variable of another launcher would tell a rank a different place in a different world.
fn contradicts(name: &OsStr) -> bool {
    const PREFIXES: [&str; 5] =
        ["OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_WORLD_"];
    const NAMES: [&str; 7] = [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_NODEID",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
    ];
    let Some(name) = name.to_str() else { return false };
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(job: &Job, local: usize, name: &str) -> String {
        let store = StoreAddress { host: "node0".into(), port: 29500 };
        let variables = job.variables(local, &store);
        variables.into_iter().find(|(n, _)| *n == name).map(|(_, value)| value).unwrap()
    }

    #[test]
    fn ranks_of_a_later_node_follow_those_of_the_earlier() {
        let job = Job { nodes: 3, node: 2, ..Job::new(vec!["x".into()], 4) };
        assert_eq!(variable(&job, 1, "RANK"), "9");
        assert_eq!(variable(&job, 1, "LOCAL_RANK"), "1");
        assert_eq!(variable(&job, 1, "GROUP_RANK"), "2");
        assert_eq!(variable(&job, 1, "WORLD_SIZE"), "12");
        assert_eq!(variable(&job, 1, "LOCAL_WORLD_SIZE"), "4");
        assert_eq!(variable(&job, 1, "MASTER_ADDR"), "node0");
    }

    #[test]
    fn only_variables_that_name_a_rank_are_removed() {
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"] {
            assert!(contradicts(name.as_ref()), "{name}");
        }
        for name in ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "OMPI_MCA_btl", "PATH"] {
            assert!(!contradicts(name.as_ref()), "{name}");
        }
    }

    #[test]
    fn several_nodes_need_an_address_and_a_port() {
        let job = Job { nodes: 2, ..Job::new(vec!["x".into()], 1) };
        let error = job.host_store().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("--master-addr"), "{error}");
        let job = Job { master_addr: Some("a".into()), ..job };
        let error = job.host_store().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("--master-port"), "{error}");
    }
}
