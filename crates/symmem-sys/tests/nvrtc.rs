//! The real compiler, from the Python wheel that `cargo xtask kernels` takes as well; no device is needed.
//!
//! `SYMMEM_NVRTC` names another one. Without either, each test says so and passes.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use symmem_sys::nvrtc::{Failure, Nvrtc};

const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.4.127";
const PIP: &str = "-m pip install --quiet --no-input --disable-pip-version-check --no-deps --retries 1 --timeout 20";
const HEADER: &str = include_str!("../../symmem/kernels/symmem.cuh");
const OPTIONS: [&str; 2] = ["-std=c++17", "--gpu-architecture=compute_80"];

/// The compiler, or `None`, with the reason printed.
fn nvrtc() -> Option<&'static Nvrtc> {
    static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let file = match std::env::var_os("SYMMEM_NVRTC") {
            Some(path) => PathBuf::from(path),
            None => installed()?,
        };
        Nvrtc::open(&file).map_err(|missing| missing.to_string())
    });
    found.as_ref().map_err(|why| eprintln!("skipped: {why}; set SYMMEM_NVRTC")).ok()
}

/// The wheel's library; it is installed unless it is there from an earlier run.
fn installed() -> Result<PathBuf, String> {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvrtc");
    let python = venv.join("bin/python");
    let library = || {
        let find = "import nvidia; print(list(nvidia.__path__)[0])";
        let packages = output(Command::new(&python).args(["-c", find]))?;
        let file = Path::new(packages.trim()).join("cuda_nvrtc/lib/libnvrtc.so.12");
        file.exists().then_some(file).ok_or_else(|| format!("{WHEEL} has no library"))
    };
    if let Ok(file) = library() {
        return Ok(file);
    }
    output(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    output(Command::new(&python).args(PIP.split(' ')).arg(WHEEL))?;
    library()
}

fn output(command: &mut Command) -> Result<String, String> {
    let done = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim()))
}

#[test]
fn a_kernel_with_the_public_header_becomes_ptx() {
    let Some(nvrtc) = nvrtc() else { return };
    assert!(nvrtc.version().unwrap() >= (12, 0));
    let source = r#"
        #include "symmem.cuh"
        extern "C" __global__ void ring(const __grid_constant__ SymmemHandle handle) {
            symmem_put_signal(handle, (handle.rank + 1) % handle.size, 0);
            symmem_wait_signal(handle, (handle.rank + handle.size - 1) % handle.size, 0);
            symmem_barrier(handle, 1);
        }
    "#;
    let ptx = nvrtc.compile(source, "ring.cu", &OPTIONS, &[("symmem.cuh", HEADER)]).unwrap();
    assert!(ptx.contains(".visible .entry ring("), "{ptx}");
    assert!(ptx.contains(".target sm_80"), "{ptx}");
    assert!(ptx.contains("param_0[1776]"), "the handle is passed by value: {ptx}");
}

#[test]
fn the_kernel_of_the_example_compiles() {
    let Some(nvrtc) = nvrtc() else { return };
    let example = include_str!("../../symmem/examples/08_custom_kernel.rs");
    let (_, rest) = example.split_once("r#\"").unwrap();
    let (source, _) = rest.split_once("\"#;").unwrap();
    let ptx = nvrtc.compile(source, "pass_on.cu", &OPTIONS, &[("symmem.cuh", HEADER)]).unwrap();
    assert!(ptx.contains(".visible .entry pass_on("), "{ptx}");
}

#[test]
fn what_does_not_compile_comes_with_the_compilers_words() {
    let Some(nvrtc) = nvrtc() else { return };
    let failure = nvrtc.compile("int f() { return x; }", "wrong.cu", &OPTIONS, &[]).unwrap_err();
    let Failure::Refused { name, log } = failure else { unreachable!("{failure}") };
    assert_eq!(name, "wrong.cu");
    assert!(log.contains("wrong.cu(1)") && log.contains("\"x\" is undefined"), "{log}");

    let missing = nvrtc.compile("#include \"symmem.cuh\"", "bare.cu", &OPTIONS, &[]).unwrap_err();
    assert!(missing.to_string().contains("symmem.cuh"), "{missing}");

    let option = nvrtc.compile("", "empty.cu", &["--no-such-option"], &[]).unwrap_err();
    assert!(option.to_string().contains("no-such-option"), "{option}");
}

#[test]
fn threads_compile_at_the_same_time() {
    let Some(nvrtc) = nvrtc() else { return };
    std::thread::scope(|scope| {
        for number in 0..4 {
            scope.spawn(move || {
                let source = format!("extern \"C\" __global__ void k{number}() {{}}");
                let ptx = nvrtc.compile(&source, "k.cu", &OPTIONS, &[]).unwrap();
                assert!(ptx.contains(&format!(".entry k{number}(")), "{ptx}");
            });
        }
    });
}
