//! The device that this rank works on, for as long as the process lives.

use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

pub(super) use super::raw::Device;

/// How many devices this process sees; at least one.
fn count() -> Result<usize> {
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
    Ok(())
}

/// That of this rank: the one that the user named, or the ranks of a machine go around all.
pub(super) fn of_rank(asked: Option<u32>) -> Result<&'static Device> {
    // Kept to the end: opening it anew for each figure would translate the kernels anew.
    static DEVICE: OnceLock<Device> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let local = std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse::<usize>().ok());
    let next = (local.unwrap_or(0) % count()?) as u32;
    let device = Device::open(asked.unwrap_or(next))?;
    Ok(DEVICE.get_or_init(|| device))
}
