//! One device: its primary context, and what the library keeps for it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use symmem_sys::cuda::{self, Attribute, Context, Device, Driver, Failure};

use super::failed;
use super::kernels::Kernels;
use crate::error::{Error, Result};

/// A device that this process uses. Cheap to clone.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    driver: Arc<dyn Driver>,
    device: Device,
    number: u32,
    uuid: [u8; 16],
    context: Context,
    multiprocessors: u32,
    kernels: Kernels,
}

/// The devices that are open, so that each has its kernels loaded once.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

impl Gpu {
    /// The device of this number among those that this process sees.
    pub fn open(number: u32) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|gpu| gpu.strong_count() > 0);
        let mut living = open.iter().filter_map(Weak::upgrade);
        if let Some(gpu) = living.find(|gpu| gpu.number == number) {
            return Ok(Self(gpu));
        }
        let driver = cuda::load().map_err(|missing| Error::Unavailable {
            what: "the CUDA driver".into(),
            why: missing.to_string(),
        })?;
        let gpu = Self::with_driver(driver, number)?;
        open.push(Arc::downgrade(&gpu.0));
        Ok(gpu)
    }

    /// As [`Gpu::open`], through a driver of the caller's, such as a fake one.
    pub fn with_driver(driver: Arc<dyn Driver>, number: u32) -> Result<Self> {
        driver.init().map_err(failed)?;
        let count = driver.device_count().map_err(failed)?;
        if number as usize >= count {
            return Err(Error::Unavailable {
                what: format!("cuda:{number}"),
                why: format!("this process sees {count} devices"),
            });
        }
        let device = driver.device(number as usize).map_err(failed)?;
        for (attribute, what) in [
            (Attribute::VirtualMemory, "virtual memory management"),
            (Attribute::FdHandles, "memory that can be exported as a descriptor"),
        ] {
            if !driver.has(attribute, device) {
                let name = driver.device_name(device).unwrap_or_default();
                let why = format!("cuda:{number} ({name}) does not have it");
                return Err(Error::Unavailable { what: what.to_owned(), why });
            }
        }
        let multiprocessors = driver.attribute(Attribute::SmCount, device).map_err(failed)?;
        let uuid = driver.device_uuid(device).map_err(failed)?;
        let context = driver.context_retain(device).map_err(failed)?;
        let kernels = Kernels::default();
        let multiprocessors = u32::try_from(multiprocessors).unwrap_or(1);
        Ok(Self(Arc::new(Inner {
            driver,
            device,
            number,
            uuid,
            context,
            multiprocessors,
            kernels,
        })))
    }

    /// Its number among those that this process sees.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Which device it is, for all processes alike.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    pub(super) fn device(&self) -> Device {
        self.0.device
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.0.kernels
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.0.driver
    }

    /// Calls the driver with this device's context current, and leaves the thread with the one it had.
    pub(super) fn call<R>(
        &self,
        f: impl FnOnce(&dyn Driver) -> Result<R, Failure>,
    ) -> Result<R> {
        let driver = self.driver();
        if driver.context_current().map_err(failed)? == Some(self.0.context) {
            return f(driver).map_err(failed);
        }
        driver.context_push(self.0.context).map_err(failed)?;
        let done = f(driver);
        let popped = driver.context_pop();
        let done = done.map_err(failed)?;
        popped.map_err(failed)?;
        Ok(done)
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.number())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.kernels.unload(&*self.driver, self.context);
        // SAFETY: S4: retained once, in `with_driver`; whatever uses the context keeps this alive.
        if let Err(e) = unsafe { self.driver.context_release(self.device) } {
            tracing::warn!("{e}");
        }
    }
}
