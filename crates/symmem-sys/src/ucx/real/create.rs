//! Making and unmaking a context and its worker.
#![allow(unsafe_code)] // S4

use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;

use crate::ucx::engine::{MAX_HEADER, Settings};
use crate::ucx::types::{
    self, ContextParams, WorkerAttributes, WorkerParams, context_field, feature, worker_field,
};
use crate::ucx::{Failure, OLDEST, Result, Ucx, Version};

/// `UCS_ERR_NO_ELEM`
const NO_SUCH_SETTING: i8 = -12;

/// The library's context and worker.
pub(super) struct Handles {
    context: usize,
    worker: usize,
}

impl Handles {
    /// `ucp_init_version`, `ucp_worker_create`
    pub(super) fn new(ucx: &Ucx, settings: &Settings) -> Result<Self> {
        let context = new_context(ucx, settings)?;
        let params = WorkerParams {
            field_mask: types::WORKER_THREAD_MODE,
            thread_mode: types::SERIALIZED,
            ..WorkerParams::default()
        };
        let mut worker = 0;
        // SAFETY: the context was just made; the library reads the fields of the mask and writes the handle.
        let status = unsafe { (ucx.c.ucp_worker_create)(context, &params, &mut worker) };
        if let Err(failure) = ucx.check("ucp_worker_create", status) {
            // SAFETY: nothing was made of it.
            unsafe { (ucx.c.ucp_cleanup)(context) };
            return Err(failure);
        }
        let handles = Self { context, worker };
        handles.check(ucx).inspect_err(|_| handles.destroy(ucx))?;
        Ok(handles)
    }

    pub(super) fn worker(&self) -> usize {
        self.worker
    }

    /// `ucp_worker_get_address`
    pub(super) fn address(&self, ucx: &Ucx) -> Result<Vec<u8>> {
        let (mut address, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the worker is there; it writes a pointer and a length.
        let status =
            unsafe { (ucx.c.ucp_worker_get_address)(self.worker, &mut address, &mut bytes) };
        ucx.check("ucp_worker_get_address", status)?;
        // SAFETY: so many bytes are there until they are released.
        let copy = unsafe { std::slice::from_raw_parts(address, bytes) }.to_vec();
        // SAFETY: it is released once and not used again.
        unsafe { (ucx.c.ucp_worker_release_address)(self.worker, address) };
        Ok(copy)
    }

    /// `ucp_worker_get_efd`, under a number of our own.
    pub(super) fn descriptor(&self, ucx: &Ucx) -> Result<OwnedFd> {
        let mut descriptor = -1;
        // SAFETY: the worker is there; it writes the number.
        let status = unsafe { (ucx.c.ucp_worker_get_efd)(self.worker, &mut descriptor) };
        ucx.check("ucp_worker_get_efd", status)?;
        // SAFETY: it is open as long as the worker is there.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let copied = borrowed.try_clone_to_owned();
        copied.map_err(|error| Failure::refused("ucp_worker_get_efd", error.to_string()))
    }

    /// `ucp_worker_destroy`, `ucp_cleanup`. Called once; no other call comes after it.
    pub(super) fn destroy(&self, ucx: &Ucx) {
        // SAFETY: nobody uses it any more.
        unsafe { (ucx.c.ucp_worker_destroy)(self.worker) };
        // SAFETY: likewise; its only worker is gone.
        unsafe { (ucx.c.ucp_cleanup)(self.context) };
    }

    /// Whether the worker is as it was asked for.
    fn check(&self, ucx: &Ucx) -> Result<()> {
        let mut attributes = WorkerAttributes {
            field_mask: worker_field::THREAD_MODE | worker_field::MAX_AM_HEADER,
            ..WorkerAttributes::default()
        };
        // SAFETY: the worker is there; the library writes the fields of the mask.
        let status = unsafe { (ucx.c.ucp_worker_query)(self.worker, &mut attributes) };
        ucx.check("ucp_worker_query", status)?;
        let refuse = |why: String| Err(Failure::refused("ucp_worker_create", why));
        if attributes.thread_mode < types::SERIALIZED {
            return refuse("this build of UCX serves one thread only".to_owned());
        }
        if attributes.max_am_header < MAX_HEADER {
            let most = attributes.max_am_header;
            return refuse(format!("headers of {most} bytes at most, {MAX_HEADER} are needed"));
        }
        Ok(())
    }
}

/// `ucp_init_version`
fn new_context(ucx: &Ucx, settings: &Settings) -> Result<usize> {
    let config = Config::read(ucx)?;
    let transports = settings.transports.clone().unwrap_or_else(|| usual_transports(ucx));
    config.set("TLS", &transports)?;
    if let Some(devices) = &settings.devices {
        config.set("NET_DEVICES", devices)?;
    }
    config.cache_nothing()?;
    if must_copy(ucx.version()) {
        config.set("ZCOPY_THRESH", "inf")?;
        // A call of the kernel for 64 KiB, and not for 8.
        config.set_if_known("TCP_TX_SEG_SIZE", "64k")?;
    }
    let params = ContextParams {
        field_mask: context_field::FEATURES
            | context_field::MT_WORKERS_SHARED
            | context_field::NAME,
        features: feature::AM | feature::WAKEUP,
        mt_workers_shared: 0,
        name: c"symmem".as_ptr().expose_provenance(),
        ..ContextParams::default()
    };
    let (major, minor) = (u32::from(OLDEST.major), u32::from(OLDEST.minor));
    let mut context = 0;
    // SAFETY: the library reads the fields of the mask, and the configuration that it has made, and writes the handle.
    let status =
        unsafe { (ucx.c.ucp_init_version)(major, minor, &params, config.raw, &mut context) };
    ucx.check("ucp_init_version", status)?;
    Ok(context)
}

/// Everything but what needs shared memory, which we have ourselves, or devices, whose memory goes other ways.
fn usual_transports(ucx: &Ucx) -> String {
    let mut transports = "^sm".to_owned();
    // Their modules are next to the library. Naming a transport that is not installed makes UCX print a warning.
    let modules = ucx.path().and_then(|file| std::fs::read_dir(file.parent()?.join("ucx")).ok());
    let modules: Vec<_> = modules.into_iter().flatten().flatten().map(|m| m.file_name()).collect();
    for device in ["cuda", "rocm", "ze"] {
        let module = format!("libuct_{device}");
        if modules.iter().any(|name| name.to_string_lossy().starts_with(&module)) {
            transports.push(',');
            transports.push_str(device);
        }
    }
    transports
}

/// Whether this version crashes when a rendezvous ends with a failure and there is no cache of registered memory: it asks the
/// cache to forget the body.
fn needs_cache(version: Version) -> bool {
    (Version::new(1, 15, 0)..Version::new(1, 22, 0)).contains(&version)
}

/// Whether this version fails an assertion, and ends the process, when a peer dies while a body is sent from where it lies.
fn must_copy(version: Version) -> bool {
    version < Version::new(1, 16, 0)
}

/// `ucp_config_t`: what the environment says, and what we set.
struct Config<'a> {
    ucx: &'a Ucx,
    raw: usize,
}

impl<'a> Config<'a> {
    fn read(ucx: &'a Ucx) -> Result<Self> {
        let mut raw = 0;
        // SAFETY: no prefix and no file are allowed; it writes the handle.
        let status = unsafe { (ucx.c.ucp_config_read)(ptr::null(), ptr::null(), &mut raw) };
        ucx.check("ucp_config_read", status)?;
        Ok(Self { ucx, raw })
    }

    /// Does without the cache of registered memory: with it, every `munmap` of the process runs code of the library. (That
    /// the library patches `munmap` when it is loaded, only `UCX_MEM_EVENTS=n` in the environment prevents.)
    fn cache_nothing(&self) -> Result<()> {
        self.set_if_known("RCACHE_ENABLE", "n")?; // 1.12 has no such cache at this level
        if needs_cache(self.ucx.version()) {
            // Then all bodies travel with their messages.
            self.set("RNDV_THRESH", "inf")?;
        }
        Ok(())
    }

    /// As `set`, if this version has such a setting.
    fn set_if_known(&self, name: &str, value: &str) -> Result<()> {
        match self.set(name, value) {
            Err(failure) if failure.status == Some(NO_SUCH_SETTING) => Ok(()),
            other => other,
        }
    }

    /// Sets a value, unless the user has set it in the environment.
    fn set(&self, name: &str, value: &str) -> Result<()> {
        if std::env::var_os(format!("UCX_{name}")).is_some() {
            return Ok(());
        }
        let refuse = |_| Failure::refused("ucp_config_modify", format!("{name} has a zero in it"));
        let key = CString::new(name).map_err(refuse)?;
        let text = CString::new(value).map_err(refuse)?;
        let modify = self.ucx.c.ucp_config_modify;
        // SAFETY: the configuration is there; the library copies both texts.
        let status = unsafe { modify(self.raw, key.as_ptr(), text.as_ptr()) };
        self.ucx.check("ucp_config_modify", status).map_err(|failure| {
            let text = format!("{} for {name}={value}", failure.text);
            Failure { text, ..failure }
        })
    }
}

impl Drop for Config<'_> {
    fn drop(&mut self) {
        // SAFETY: it is released once and not used again.
        unsafe { (self.ucx.c.ucp_config_release)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_faults_are_known() {
        let needing = [(15, 0), (16, 0), (18, 1), (20, 1), (21, 0)];
        assert!(
            needing.iter().all(|(minor, release)| needs_cache(Version::new(1, *minor, *release)))
        );
        let others = [(12, 0), (13, 1), (14, 1), (22, 0), (23, 0)];
        assert!(
            !others.iter().any(|(minor, release)| needs_cache(Version::new(1, *minor, *release)))
        );
    }
}
