//! Ranks as processes: the test binary starts itself again, once per rank, to run the same test function.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process, set_parent_process_death_signal};
use symmem::World;
use symmem::store::TcpServer;

/// Tells a process that it is a rank of the test named in it.
pub(crate) const TEST: &str = "SYMMEM_TEST";
/// Longer than any test should take on a busy machine: a hang ends here instead of never.
const HANG: Duration = Duration::from_secs(120);

/// A test's ranks. They find only an empty directory to work in, and leave it empty.
pub struct Ranks<'a> {
    n: usize,
    env: Vec<(String, String)>,
    dying: Vec<usize>,
    hosted: bool,
    store_in_dir: bool,
    tidy: bool,
    prefix: Vec<String>,
    prepare: Box<dyn FnOnce(&Path) + 'a>,
    meanwhile: Box<dyn FnOnce(&mut Job) + 'a>,
}

/// A running job, as the test that started it sees it.
pub struct Job {
    /// The directory in which the ranks work.
    pub dir: PathBuf,
    /// Where the store listens.
    pub store: String,
    /// The store itself, where the harness hosts it.
    pub server: Option<TcpServer>,
    /// The ranks' processes.
    pub pids: Vec<u32>,
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

impl<'a> Ranks<'a> {
    /// `n` ranks, each a process.
    pub fn new(n: usize) -> Self {
        Self {
            n,
            env: Vec::new(),
            dying: Vec::new(),
            hosted: true,
            store_in_dir: false,
            tidy: true,
            prefix: Vec::new(),
            prepare: Box::new(|_| {}),
            meanwhile: Box::new(|_| {}),
        }
    }

    /// Sets an environment variable in all ranks; `{dir}` in it is the ranks' directory.
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

    /// The store listens at a socket in the ranks' directory instead of a port.
    pub fn store_in_dir(mut self) -> Self {
        self.store_in_dir = true;
        self
    }

    /// A rank may die where nobody can know of its files; a later job of the same user removes them.
    pub fn may_leave_files(mut self) -> Self {
        self.tidy = false;
        self
    }

    /// Starts every rank by this command, to which the rank's own is appended.
    pub fn under(mut self, command: &[&str]) -> Self {
        self.prefix = command.iter().map(|word| word.to_string()).collect();
        self
    }

    /// Runs in the ranks' directory before they start.
    pub fn prepare(mut self, prepare: impl FnOnce(&Path) + 'a) -> Self {
        self.prepare = Box::new(prepare);
        self
    }

    /// Runs in the process that started the ranks, while they run.
    pub fn meanwhile(mut self, meanwhile: impl FnOnce(&mut Job) + 'a) -> Self {
        self.meanwhile = Box::new(meanwhile);
        self
    }

    /// Runs `body` in every rank, joined to one world. `test` is [`crate::test_name!`].
    pub fn run(self, test: &str, body: impl FnOnce(World)) -> Vec<Ended> {
        self.start(test, || body(World::from_env().unwrap()))
    }

    /// Runs `body` in every rank without joining a world; gives back how the ranks ended.
    pub fn start(mut self, test: &str, body: impl FnOnce()) -> Vec<Ended> {
        if std::env::var(TEST).is_ok_and(|t| t == test) {
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            body();
            std::process::exit(0);
        }
        let scratch = Scratch::new();
        std::mem::replace(&mut self.prepare, Box::new(|_| {}))(&scratch.0);
        let meanwhile = std::mem::replace(&mut self.meanwhile, Box::new(|_| {}));
        let (store, server) = self.store(&scratch.0);
        let dir = scratch.0.clone();
        let mut job = Job { dir, store, server, pids: Vec::new() };
        let start = |rank| Running::start(test, rank, &job, &self);
        let mut running: Vec<Running> = (0..self.n).map(start).collect();
        job.pids = running.iter().map(|r| r.child.id()).collect();
        let deadline = Instant::now() + HANG;
        meanwhile(&mut job);
        let ended: Vec<Ended> = running.iter_mut().map(|r| r.wait(deadline)).collect();
        drop(job);
        self.check(&ended);
        if self.tidy {
            scratch.check_empty();
        }
        ended
    }

    fn store(&self, dir: &Path) -> (String, Option<TcpServer>) {
        if self.store_in_dir {
            let address = format!("unix:{}/store", dir.display());
            let server = self.hosted.then(|| TcpServer::bind(&address).unwrap());
            return (address, server);
        }
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        // Dropped, it leaves a free port for rank 0 to listen at.
        (format!("127.0.0.1:{port}"), self.hosted.then_some(server))
    }

    fn check(&self, ended: &[Ended]) {
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
    }
}

impl Ended {
    /// The moments that the rank noted under this name by [`mark`], with what it noted.
    pub fn marks(&self, name: &str) -> Vec<(Duration, String)> {
        let mark = |line: &str| {
            let mut words = line.split_once("@mark ")?.1.splitn(3, ' ');
            let (named, nanos) = (words.next()?, words.next()?.parse().ok()?);
            let noted = words.next().unwrap_or_default().to_owned();
            (named == name).then_some((Duration::from_nanos(nanos), noted))
        };
        self.output.lines().filter_map(mark).collect()
    }
}

/// Notes the time, the same clock in all processes, for the test that started this rank.
pub fn mark(name: &str, note: impl std::fmt::Display) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let nanos = now.tv_sec as u128 * 1_000_000_000 + now.tv_nsec as u128;
    // One write, also where several threads print.
    println!("@mark {name} {nanos} {note}");
}

/// How long after `died` every `noticed` came, in order of length.
pub fn latencies(ended: &[Ended]) -> Vec<Duration> {
    let died = ended.iter().flat_map(|e| e.marks("died")).map(|(at, _)| at).max();
    let noticed = ended.iter().flat_map(|e| e.marks("noticed")).map(|(at, _)| at);
    let mut all: Vec<_> = noticed.map(|at| at.saturating_sub(died.unwrap_or(at))).collect();
    all.sort();
    all
}

/// Fails if this process still holds anything of the library: memory, connections, watched processes.
pub fn assert_nothing_is_held() {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let held: Vec<String> = links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .filter(|t| ["memfd:symmem", "socket:", "pidfd"].iter().any(|what| t.contains(what)))
        .collect();
    assert!(held.is_empty(), "descriptors are left: {held:?}");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped: Vec<&str> = maps.lines().filter(|l| l.contains("memfd:symmem")).collect();
    assert!(mapped.is_empty(), "mappings are left: {mapped:#?}");
}

/// A directory of one job.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let dir =
            std::env::temp_dir().join(format!("job-{:016x}", crate::Random::unseeded().next()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn check_empty(&self) {
        let left: Vec<PathBuf> =
            std::fs::read_dir(&self.0).unwrap().flatten().map(|e| e.path()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How many ranks tests on a real GPU have, one number after the other: `SYMMEM_GPU_RANKS`, or else 1, 2 and 4.
pub fn gpu_ranks() -> Vec<usize> {
    let list = std::env::var("SYMMEM_GPU_RANKS").unwrap_or_else(|_| "1,2,4".to_owned());
    list.split(',').map(|n| n.parse().unwrap()).collect()
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
    fn start(test: &str, rank: usize, job: &Job, ranks: &Ranks<'_>) -> Self {
        let own = std::env::current_exe().unwrap().display().to_string();
        let mut words = ranks.prefix.iter().chain([&own]);
        let (address, port) = match job.store.rsplit_once(':') {
            Some((host, port)) if !ranks.store_in_dir => (host, port),
            _ => (job.store.as_str(), ""),
        };
        let dir = job.dir.display().to_string();
        let env = ranks.env.iter().map(|(name, value)| (name, value.replace("{dir}", &dir)));
        let mut child = Command::new(words.next().unwrap())
            .args(words)
            .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(TEST, test)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.n.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", address)
            .env("MASTER_PORT", port)
            .env("TORCHELASTIC_USE_AGENT_STORE", if ranks.hosted { "True" } else { "False" })
            .env("SYMMEM_TIMEOUT", "60")
            .env("TMPDIR", &job.dir)
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("SYMMEM_SOCKET_DIR")
            .envs(env)
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
    mark("died", "");
    kill_process(getpid(), Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Has this process die at some moment from now.
pub fn die_after(delay: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        die()
    });
}

/// Stops this process as a debugger or a stuck driver would; a helper process wakes it after `time`.
pub fn stop_until(time: Duration) {
    let pid: Pid = getpid();
    let waker = format!("sleep {}; kill -CONT {}", time.as_secs_f64(), pid.as_raw_nonzero());
    let mut waker = Command::new("sh").args(["-c", &waker]).spawn().unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    waker.wait().unwrap();
}
