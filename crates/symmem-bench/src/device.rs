//! The device that this rank works on, for as long as the process lives.

use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

pub(super) use super::raw::Device;

/// How many devices this process sees; at least one.
pub(super) fn count() -> Result<usize> {
    const NEEDS: &str = "--backend cuda needs a CUDA device and its driver";
    let driver = symmem_sys::cuda::load().context(NEEDS)?;
    driver.init().context(NEEDS)?;
    let count = driver.device_count().context(NEEDS)?;
    ensure!(count > 0, "{NEEDS}: this process sees no device");
    Ok(count)
}

/// Whether there is a device, and the one that the user named.
pub(super) fn check(asked: Option<u32>) -> Result<()> {
    let count = count()?;
    if let Some(asked) = asked {
        ensure!((asked as usize) < count, "there is no cuda:{asked}: this process sees {count}");
    }
    if (count == 1 || asked.is_some()) && !has_mps() {
        tracing::warn!(
            "ranks that share a device take turns of milliseconds: start nvidia-cuda-mps-control -d first"
        );
    }
    Ok(())
}

/// Whether the service that lets processes share a device at the same time seems to run.
fn has_mps() -> bool {
    let place = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map(PathBuf::from);
    let place = place.unwrap_or_else(|| std::env::temp_dir().join("nvidia-mps"));
    place.join("control").exists()
}

/// That of this rank: the one that the user named, or the ranks of a machine go around all.
pub(super) fn of_rank(asked: Option<u32>) -> Result<&'static Device> {
    // Kept to the end: opening it for each figure would compile the kernels each time.
    static DEVICE: OnceLock<Device> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let local = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse::<usize>().ok());
    let next = (local.unwrap_or(0) % count()?) as u32;
    let device = Device::open(asked.unwrap_or(next))?;
    Ok(DEVICE.get_or_init(|| device))
}
