//! A process that runs programs: all ranks of one as threads, or one rank of one that other processes run as well.

use std::io::{BufRead, Write};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use symmem::store::{SharedStore, TcpStore};
use symmem::{Deadline, World};

use symmem_chaos::board::Board;
use symmem_chaos::hooks::{self, Hooks};
use symmem_chaos::lane::{self, Rank};
use symmem_chaos::program::{Mode, Program, Spec};
use symmem_chaos::record::{Event, File, Log, Memory, now};

use crate::generate::generate;
use crate::{judge, report};

/// Longer than any wait of a program that is not broken.
const LIMIT: Duration = Duration::from_secs(20);

static STALLS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

/// Notes whenever this process gets no core for a while.
fn watch_the_machine() {
    const NAP: u64 = 2_000_000;
    std::thread::spawn(|| {
        loop {
            let before = now();
            std::thread::sleep(Duration::from_nanos(NAP));
            let late = (now() - before).saturating_sub(NAP);
            if late > 2_000_000 {
                let mut stalls = STALLS.lock().unwrap_or_else(PoisonError::into_inner);
                stalls.push((now(), late));
            }
        }
    });
}

/// Keeps the kernel from reclaiming pages of this process: a rank that waits for the disk looks like one that hangs. Not a reason
/// to fail where it is not allowed.
fn keep_in_memory() {
    use rustix::mm::{MlockAllFlags, mlockall};
    let _ = mlockall(MlockAllFlags::CURRENT);
}

fn stalls() -> Vec<Event> {
    let noted = std::mem::take(&mut *STALLS.lock().unwrap_or_else(PoisonError::into_inner));
    noted.into_iter().map(|(at, length)| Event::Stall { at, length }).collect()
}

/// Reads commands from standard input until it ends.
pub fn serve() -> anyhow::Result<()> {
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    watch_the_machine();
    keep_in_memory();
    let threads = count_threads();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["threads", spec] => {
                let program = generate(&spec.parse()?);
                let mut events = as_threads(&program);
                events.extend(left_over(0, threads));
                events.extend(stalls());
                report::print(&judge::judge(&program, &events));
            }
            ["rank", rank, spec, dir] => {
                as_process(rank.parse()?, &spec.parse()?, Path::new(dir), threads)?
            }
            _ => anyhow::bail!("unknown command {line:?}"),
        }
        println!(".");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// What is left for good is still left after so many looks, with a nap between them.
const PATIENCE: u32 = 500;
const NAP: Duration = Duration::from_millis(4);

/// All lanes of one rank.
fn as_rank(own: &Rank<'_>, world: World) {
    if !own.board.begin(own.program.ranks, own.rank) {
        return;
    }
    let before = descriptors();
    std::thread::scope(|scope| {
        let (first, others) = match own.program.lanes.split_first() {
            Some(lanes) => lanes,
            None => return,
        };
        for lane in others {
            let world = &world;
            scope.spawn(move || lane::run(own, lane, world));
        }
        lane::run(own, first, &world);
    });
    let mut more = descriptors().saturating_sub(before);
    // A thread that is just telling a group of a loss keeps it for that long, and a peer that has no core offers its group for longer.
    for _ in (0..PATIENCE).take_while(|_| own.program.spec.mode == Mode::Processes) {
        if more == 0 {
            break;
        }
        std::thread::sleep(NAP);
        more = descriptors().saturating_sub(before);
    }
    if more > 0 && own.program.spec.mode == Mode::Processes {
        let text = format!(
            "left over: {more} descriptors of memory, although all is dropped but the world"
        );
        own.log.note(Event::Fault { rank: own.rank, text });
    }
    own.log.note(Event::Left { rank: own.rank, at: now() });
    own.board.gone(own.rank);
    drop(world);
}

/// How many descriptors of the library's memory this process has.
fn descriptors() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let targets = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.display().to_string().contains("memfd:symmem")).count()
}

fn as_threads(program: &Program) -> Vec<Event> {
    let (log, board) = (Memory::default(), Board::for_threads());
    let options = World::builder().timeout(LIMIT);
    let run = |world: World| {
        let own = Rank { rank: world.rank(), program, board: &board, log: &log };
        as_rank(&own, world);
    };
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| options.threads(program.ranks, run)));
    let text = match ended {
        Ok(Ok(_)) => None,
        Ok(Err(e)) => Some(format!("no world: {e}")),
        Err(panic) => Some(format!("panic: {}", said(&*panic))),
    };
    let mut events = log.take();
    events.extend(text.map(|text| Event::Fault { rank: 0, text }));
    events
}

fn said(panic: &dyn std::any::Any) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

fn as_process(rank: usize, spec: &Spec, dir: &Path, threads: usize) -> anyhow::Result<()> {
    let program = generate(spec);
    let open = |name: &str| std::fs::OpenOptions::new().read(true).write(true).open(dir.join(name));
    let log = open(&format!("log{rank}"))?;
    let hooks = Arc::new(Hooks { board: Board::in_file(open("board")?), log: File(log) });
    hooks::set(Some(Arc::clone(&hooks)));
    let own = Rank { rank, program: &program, board: &hooks.board, log: &hooks.log };
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| -> symmem::Result<()> {
        let address = format!("unix:{}/store", dir.display());
        let store: SharedStore = Arc::new(TcpStore::connect(&address, Deadline::within(LIMIT))?);
        let options = World::builder().timeout(LIMIT);
        as_rank(&own, options.join(rank, program.ranks, store)?);
        Ok(())
    }));
    let text = match ended {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(format!("no world: {e}")),
        Err(panic) => Some(format!("panic: {}", said(&*panic))),
    };
    let fault = text.map(|text| Event::Fault { rank, text });
    for event in fault.into_iter().chain(left_over(rank, threads)).chain(stalls()) {
        hooks.log.note(event);
    }
    hooks::set(None);
    Ok(())
}

fn count_threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// What the library has not given back: descriptors, mappings, threads.
fn left_over(rank: usize, threads: usize) -> Option<Event> {
    let look = || {
        let mut left: Vec<String> = Vec::new();
        let links = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        left.extend(
            links
                .filter_map(|entry| std::fs::read_link(entry.path()).ok())
                .map(|target| target.display().to_string())
                .filter(|t| ["memfd:symmem", "socket:", "pidfd"].iter().any(|w| t.contains(w))),
        );
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mapped = maps.lines().filter(|l| l.contains("memfd:symmem"));
        left.extend(mapped.map(|line| format!("mapping {line}")));
        let more = count_threads().saturating_sub(threads);
        if more > 0 {
            let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
            let names = tasks.filter_map(|task| {
                let of = |file| std::fs::read_to_string(task.path().join(file)).ok();
                Some(format!("{} in {}", of("comm")?.trim(), of("wchan").unwrap_or_default()))
            });
            left.push(format!("{more} threads of {:?}", names.collect::<Vec<_>>()));
        }
        left
    };
    let mut left = look();
    // Threads that the system has not yet taken away, for want of a core.
    for _ in 0..PATIENCE {
        if left.is_empty() {
            return None;
        }
        std::thread::sleep(NAP);
        left = look();
    }
    let text = format!("left over: {} things, such as {}", left.len(), left[0]);
    Some(Event::Fault { rank, text })
}
