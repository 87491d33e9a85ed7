//! The PTX in `crates/symmem/kernels/ptx.zst`, made from the `*.cu` next to it by NVRTC and checked by ptxas. Both come as
//! Python wheels of fixed versions, into a virtual environment of their own, and need no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};

use crate::command::{output, root, run, target_dir};
use crate::{Arguments, Outcome};

/// NVRTC 12.4 makes PTX 8.4, which drivers from 550 on load. Of the newer toolkit only ptxas is used.
const WHEELS: &[&str] =
    &["nvidia-cuda-nvrtc-cu12==12.4.127", "nvidia-cuda-nvcc==13.0.88", "zstandard==0.25.0"];
const PIP: &str = "-m pip install --quiet --no-input --disable-pip-version-check --no-deps --retries 1 --timeout 20";
/// The archive of all PTX, each file after a line with its name and length.
const ARCHIVE: &str = "ptx.zst";
/// What is also made for newer devices, on which a kernel can be launched before the one before it has ended.
const NEWER: &[&str] = &["f32", "bf16", "f16"];
/// Of which tiles are reduced.
const TILED: &[&str] = &["f32", "bf16", "f16"];
/// What switches can add.
const SWITCHED: &[&str] = &["f32", "bf16", "f16"];
const LAYOUT: &str = "symmem_layout";

/// One PTX file.
struct Job {
    name: String,
    source: &'static str,
    number: Option<String>,
    /// The oldest architecture that runs it.
    oldest: u32,
}

impl Job {
    /// As `nvrtc.py` wants it.
    fn argument(&self) -> String {
        let number =
            self.number.as_ref().map_or_else(String::new, |number| format!(":SYMMEM_T={number}"));
        format!("{}:{}:compute_{}{number}", self.name, self.source, self.oldest)
    }
}

/// The element types that have a `Number_…` in `numbers.cuh`.
fn numbers() -> Result<Vec<String>> {
    let text = std::fs::read_to_string(sources().join("numbers.cuh")).context("no numbers.cuh")?;
    let names = text.lines().filter_map(|line| line.strip_prefix("typedef ")?.strip_suffix(';'));
    Ok(names.filter_map(|line| Some(line.split_once(" Number_")?.1.to_owned())).collect())
}

fn jobs() -> Result<Vec<Job>> {
    let plain =
        |name: &str, source| Job { name: name.to_owned(), source, number: None, oldest: 80 };
    let reduce = numbers()?.into_iter().map(|number| Job {
        name: format!("reduce_{number}"),
        source: "reduce.cu",
        number: Some(number),
        oldest: 80,
    });
    let tiles = TILED.iter().map(|&number| Job {
        name: format!("tiles_{number}"),
        source: "tiles.cu",
        number: Some(number.to_owned()),
        oldest: 80,
    });
    let multimem = SWITCHED.iter().map(|&number| Job {
        name: format!("multimem_{number}"),
        source: "multimem.cu",
        number: Some(number.to_owned()),
        oldest: 90,
    });
    let newer = NEWER.iter().map(|&number| Job {
        name: format!("reduce_{number}_90"),
        source: "reduce.cu",
        number: Some(number.to_owned()),
        oldest: 90,
    });
    let newer_move = Job { oldest: 90, ..plain("move_90", "move.cu") };
    let litmus = plain("litmus", "litmus.cu");
    let moves = [plain("move", "move.cu"), plain("rows", "rows.cu"), newer_move, litmus];
    Ok(moves.into_iter().chain(reduce).chain(newer).chain(tiles).chain(multimem).collect())
}

/// The tools, in the virtual environment.
struct Tools {
    python: PathBuf,
    nvrtc: PathBuf,
    ptxas: PathBuf,
}

/// Makes the archive, or with `--check` compares it with what would be made and assembles it.
pub(crate) fn kernels(mut arguments: Arguments) -> Result<Outcome> {
    let check = arguments.flag("--check");
    arguments.finish()?;
    let tools = match tools() {
        Ok(tools) => tools,
        Err(why) if check => {
            let why = format!("{ARCHIVE} was NOT checked, the CUDA wheels cannot be had: {why:#}");
            return Ok(Outcome::Skipped(why));
        }
        Err(why) => return Err(why.context("the CUDA wheels cannot be had")),
    };
    let (jobs, made) = (jobs()?, target_dir("kernels").join("ptx"));
    compile(&tools, &jobs, &made)?;
    if check {
        compare(&tools, &made)?;
        assemble(&tools, &jobs, &made)?;
    } else {
        std::fs::copy(made.join(ARCHIVE), committed()).context("could not write the archive")?;
    }
    println!("layout: {}", layout(&made.join("move.ptx"))?);
    Ok(Outcome::Done)
}

fn sources() -> PathBuf {
    root().join("crates/symmem/kernels")
}

fn committed() -> PathBuf {
    sources().join(ARCHIVE)
}

/// Installs the wheels unless they are there.
fn tools() -> Result<Tools> {
    let venv = target_dir("kernels").join("venv");
    let (stamp, wanted) = (venv.join("wheels"), WHEELS.join(" "));
    let python = venv.join("bin/python");
    if std::fs::read_to_string(&stamp).ok().as_deref() != Some(&wanted) {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let mut pip = Command::new(&python);
        pip.args(PIP.split(' '));
        run(pip.args(WHEELS))?;
        std::fs::write(&stamp, &wanted).context("could not note the wheels")?;
    }
    let find = "import nvidia, sys; print(list(nvidia.__path__)[0])";
    let packages = PathBuf::from(output(Command::new(&python).args(["-c", find]))?.trim());
    let nvrtc = packages.join("cuda_nvrtc/lib/libnvrtc.so.12");
    let ptxas = packages.join("cu13/bin/ptxas");
    for file in [&nvrtc, &ptxas] {
        if !file.exists() {
            bail!("the wheels have no {}", file.display());
        }
    }
    Ok(Tools { python, nvrtc, ptxas })
}

fn compile(tools: &Tools, jobs: &[Job], made: &Path) -> Result<()> {
    let mut command = Command::new(&tools.python);
    command.arg(root().join("xtask/nvrtc.py")).arg(&tools.nvrtc);
    command.arg(sources()).arg(made).args(jobs.iter().map(Job::argument));
    run(&mut command)
}

/// Fails unless what is committed is what the sources give. Compressors may differ, so the contents are compared.
fn compare(tools: &Tools, made: &Path) -> Result<()> {
    let unpack = "import sys, zstandard; \
                  a, b = (zstandard.ZstdDecompressor().decompress(open(p, 'rb').read()) for p in sys.argv[1:]); \
                  sys.exit(a != b)";
    let mut command = Command::new(&tools.python);
    command.args(["-c", unpack]).arg(committed()).arg(made.join(ARCHIVE));
    run(&mut command)
        .with_context(|| format!("{ARCHIVE} is not what the sources give (cargo xtask kernels)"))
}

/// Runs ptxas on every file, for every architecture that applies: NVRTC does not look into inline PTX.
fn assemble(tools: &Tools, jobs: &[Job], made: &Path) -> Result<()> {
    let all = jobs.iter().flat_map(|job| [80, 90, 100].map(|architecture| (job, architecture)));
    let left = Mutex::new(all.filter(|(job, architecture)| *architecture >= job.oldest));
    let next = || left.lock().ok().and_then(|mut left| left.next());
    let work = || -> Result<()> {
        while let Some((job, architecture)) = next() {
            println!("{}", assemble_one(tools, &job.name, architecture, made)?);
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut ended = workers.into_iter().map(|worker| worker.join());
        ended.try_for_each(|end| end.unwrap_or_else(|_| bail!("a thread panicked")))
    })
}

fn assemble_one(tools: &Tools, name: &str, architecture: u32, made: &Path) -> Result<String> {
    let mut command = Command::new(&tools.ptxas);
    command.arg(format!("-arch=sm_{architecture}")).args(["-v", "-o", "/dev/null"]);
    let said = command.arg(made.join(format!("{name}.ptx"))).output().context("no ptxas")?;
    let said_text = String::from_utf8_lossy(&said.stderr);
    if !said.status.success() {
        bail!("ptxas refuses {name} for sm_{architecture}:\n{said_text}");
    }
    Ok(format!("{name:16} sm_{architecture:<4} {}", summary(&said_text)))
}

/// What `ptxas -v` says about all kernels of a file together.
fn summary(said: &str) -> String {
    let before = |what: &str| {
        let found = said.match_indices(what).filter_map(|(at, _)| {
            said[..at].split_whitespace().next_back().and_then(|word| word.parse::<u32>().ok())
        });
        found.collect::<Vec<_>>()
    };
    let kernels = said.matches("Compiling entry function").count();
    let registers = before(" registers").into_iter().max().unwrap_or(0);
    let spilled: u32 = before(" bytes spill stores").into_iter().sum();
    format!("{kernels} kernels, at most {registers} registers, {spilled} bytes spilled")
}

/// The sizes and places of fields that the compiler found, which the host asserts as well.
fn layout(ptx: &Path) -> Result<String> {
    let text = std::fs::read_to_string(ptx).context("no move.ptx")?;
    let line = text.lines().find(|line| line.contains(LAYOUT) && line.contains('='));
    let words = line.map(words).with_context(|| format!("move.ptx has no {LAYOUT}"))?;
    Ok(format!("{words:?}"))
}

/// The words of an array that PTX has as bytes, without zeros at its end.
fn words(line: &str) -> Vec<u32> {
    let list = line.rsplit('{').next().unwrap_or_default();
    let bytes: Vec<u8> = list
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    bytes.chunks(4).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_made_twice() {
        let jobs = jobs().unwrap();
        let names: std::collections::BTreeSet<_> = jobs.iter().map(|job| &job.name).collect();
        assert_eq!(names.len(), jobs.len());
        assert!(names.iter().any(|name| *name == "reduce_c128"));
    }

    #[test]
    fn a_job_says_what_to_compile() {
        let jobs = jobs().unwrap();
        assert_eq!(jobs[0].argument(), "move:move.cu:compute_80");
        let last = jobs.last().unwrap().argument();
        assert_eq!(last, "multimem_f16:multimem.cu:compute_90:SYMMEM_T=f16");
    }

    #[test]
    fn what_ptxas_says_is_summed_up() {
        let said = "ptxas info : Compiling entry function 'a' for 'sm_90'\n\
            \t0 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads\n\
            ptxas info : Used 64 registers, used 1 barriers\n\
            ptxas info : Compiling entry function 'b' for 'sm_90'\n\
            \t0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n\
            ptxas info : Used 12 registers\n";
        assert_eq!(summary(said), "2 kernels, at most 64 registers, 12 bytes spilled");
    }

    #[test]
    fn bytes_of_an_array_become_words() {
        let line = ".const .align 4 .b8 symmem_layout[12] = {32, 0, 0, 0, 104, 2, 0, 0, 176, 4};";
        assert_eq!(words(line), [32, 616, 1200]);
    }
}
