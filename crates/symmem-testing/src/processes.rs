//! Ranks as processes: the test binary starts itself again, once per rank, to run the same test function.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process, set_parent_process_death_signal};
use symmem::store::TcpServer;
use symmem::{World, WorldOptions};

/// Tells a process that it is a rank of the test named in it.
const TEST: &str = "SYMMEM_TEST";
/// Longer than any test should take on a busy machine: a hang ends here instead of never.
const HANG: Duration = Duration::from_secs(120);

/// A test's ranks.
pub struct Ranks {
    n: usize,
    env: Vec<(String, String)>,
    dying: Vec<usize>,
    hosted: bool,
}

/// How one rank ended.
#[derive(Debug)]
pub struct Ended {
    /// Its number in the world.
    pub rank: usize,
    /// As the system tells.
    pub status: ExitStatus,
    /// Standard output and error.
    pub output: String,
}

impl Ranks {
    /// `n` ranks, each a process.
    pub fn new(n: usize) -> Self {
        Self { n, env: Vec::new(), dying: Vec::new(), hosted: true }
    }

    /// Sets an environment variable in all ranks.
    pub fn env(mut self, name: &str, value: impl ToString) -> Self {
        self.env.push((name.to_owned(), value.to_string()));
        self
    }

    /// These ranks are killed in the course of the test; all others must succeed.
    pub fn dying(mut self, ranks: &[usize]) -> Self {
        self.dying.extend(ranks);
        self
    }

    /// Rank 0 hosts the store instead of this harness.
    pub fn rank_0_hosts_the_store(mut self) -> Self {
        self.hosted = false;
        self
    }

    /// Runs `body` in every rank, joined to one world. `test` is [`crate::test_name!`].
    pub fn run(self, test: &str, body: impl FnOnce(World)) {
        self.start(test, || body(WorldOptions::default().from_env().unwrap()));
    }

    /// Runs `body` in every rank without joining a world; gives back how the ranks ended.
    pub fn start(self, test: &str, body: impl FnOnce()) -> Vec<Ended> {
        if std::env::var(TEST).is_ok_and(|t| t == test) {
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            body();
            std::process::exit(0);
        }
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        // A free port for rank 0 to listen at.
        let server = self.hosted.then_some(server);
        let mut running: Vec<Running> =
            (0..self.n).map(|rank| Running::start(test, rank, port, &self)).collect();
        let deadline = Instant::now() + HANG;
        let ended: Vec<Ended> = running.iter_mut().map(|r| r.wait(deadline)).collect();
        drop(server);
        let failed =
            |e: &&Ended| !(e.status.success() || killed(e) && self.dying.contains(&e.rank));
        let failures: Vec<String> = ended
            .iter()
            .filter(failed)
            .map(|e| format!("--- rank {}: {}\n{}", e.rank, e.status, e.output))
            .collect();
        assert!(
            failures.is_empty(),
            "{} of {} ranks failed\n{}",
            failures.len(),
            self.n,
            failures.join("\n")
        );
        ended
    }
}

fn killed(ended: &Ended) -> bool {
    ended.status.signal() == Some(9)
}

struct Running {
    rank: usize,
    child: Child,
    readers: Vec<JoinHandle<String>>,
}

impl Running {
    fn start(test: &str, rank: usize, port: u16, ranks: &Ranks) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(TEST, test)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.n.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", if ranks.hosted { "True" } else { "False" })
            .env("SYMMEM_TIMEOUT", "60")
            .envs(ranks.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = read_all(child.stdout.take().unwrap());
        let stderr = read_all(child.stderr.take().unwrap());
        Self { rank, child, readers: vec![stdout, stderr] }
    }

    fn wait(&mut self, deadline: Instant) -> Ended {
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    let _ = self.child.kill();
                    break self.child.wait().unwrap();
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let output = self.readers.drain(..).map(|r| r.join().unwrap()).collect();
        Ended { rank: self.rank, status, output }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Ends this process as a crash would: nothing is cleaned up, nobody is told.
pub fn die() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Stops this process as a debugger or a stuck driver would; a helper process wakes it after `time`.
pub fn stop_until(time: Duration) {
    let pid: Pid = getpid();
    let waker = format!("sleep {}; kill -CONT {}", time.as_secs_f64(), pid.as_raw_nonzero());
    let mut waker = Command::new("sh").args(["-c", &waker]).spawn().unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    waker.wait().unwrap();
}
