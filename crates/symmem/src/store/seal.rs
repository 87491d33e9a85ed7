//! Values in a store that others can write to: sealed with a secret of the job, so that what is not from one of its ranks is
//! noticed.
//!
//! A sealed value is the value and a keyed hash of it and its key. Values can be read by all, which does no harm: the token
//! that ranks show each other is made from the secret and never in the store.

use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Error, Result};
use crate::private;

const SECRET: &str = "SYMMEM_SECRET";
const SECRET_FILE: &str = "SYMMEM_SECRET_FILE";
/// The fewest bytes of a secret: others can try secrets as fast as they can compute.
const MIN_LEN: usize = 16;
/// The most that is read of a file.
const MAX_LEN: u64 = 4096;
const TAG: usize = blake3::OUT_LEN;

/// The seal of a job; without a secret, values go as they are.
pub(crate) struct Seal {
    has_secret: bool,
    key: [u8; blake3::KEY_LEN],
}

impl Seal {
    /// The seal of the job with this secret. Jobs with the same secret, or none, and different names do not know each
    /// other's.
    fn new(secret: &[u8], job: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("symmem 2026 values in the store of a job");
        hasher.update(&(secret.len() as u64).to_le_bytes()).update(secret).update(job.as_bytes());
        Self { has_secret: !secret.is_empty(), key: *hasher.finalize().as_bytes() }
    }

    /// Whether what others write to the store is noticed.
    pub(crate) fn has_secret(&self) -> bool {
        self.has_secret
    }

    /// With the secret that the environment tells, if any.
    pub(crate) fn from_env(job: &str) -> Result<Self> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let secret = match (set(SECRET), set(SECRET_FILE)) {
            (Some(secret), _) => std::os::unix::ffi::OsStringExt::into_vec(secret),
            (None, Some(path)) => read_secret(Path::new(&path))?,
            (None, None) => return Ok(Self::new(&[], job)),
        };
        let secret = secret.trim_ascii();
        if secret.len() < MIN_LEN {
            let expected = format!(
                "a secret of at least {MIN_LEN} bytes in {SECRET}, or in the file {SECRET_FILE}"
            );
            return Err(usage(expected, format!("{} bytes", secret.len())));
        }
        Ok(Self::new(secret, job))
    }

    /// What to store under `key` for `value`.
    pub(crate) fn close(&self, key: &str, value: &[u8]) -> Vec<u8> {
        if self.has_secret {
            [value, self.tag(key, value).as_bytes()].concat()
        } else {
            value.to_vec()
        }
    }

    /// The value of what was found under `key` in the store `with`.
    pub(crate) fn open(&self, key: &str, mut sealed: Vec<u8>, with: &str) -> Result<Vec<u8>> {
        if !self.has_secret {
            return Ok(sealed);
        }
        let len = sealed.len().checked_sub(TAG);
        let tag = len.and_then(|len| <[u8; TAG]>::try_from(sealed.get(len..)?).ok());
        sealed.truncate(len.unwrap_or(0));
        // This comparison takes the same time whatever the tags are.
        match tag.map(blake3::Hash::from_bytes) {
            Some(tag) if self.tag(key, &sealed) == tag => Ok(sealed),
            _ => Err(Error::Protocol {
                with: with.to_owned(),
                expected: format!(
                    "a value of {key:?} with the seal of this job ({SECRET}, {SECRET_FILE})"
                ),
                got: "one without: somebody else wrote it, or ranks have different secrets".into(),
            }),
        }
    }

    /// A key of the job's secret for something else; none without a secret.
    pub(crate) fn derive(&self, purpose: &str) -> Option<[u8; 32]> {
        self.has_secret.then(|| blake3::derive_key(purpose, &self.key))
    }

    /// The token of ranks that have found `drawn` in the store: with a secret, one that nobody else can make.
    pub(crate) fn token(&self, drawn: u128) -> u128 {
        let tag = self.tag("", &drawn.to_le_bytes());
        tag.as_bytes().first_chunk().copied().map_or(drawn, u128::from_le_bytes)
    }

    fn tag(&self, key: &str, value: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(value);
        hasher.finalize()
    }
}

/// A file that nobody else can read or could have written.
fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let named = || format!("reading {SECRET_FILE}={}", path.display());
    // Opening a pipe would wait for somebody to write to it.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(Error::system(named()))?;
    let about = file.metadata().map_err(Error::system(named()))?;
    if !about.is_file() || !private::is_trusted(about.uid()) || about.mode() & 0o077 != 0 {
        let got = format!("mode {:04o} of user {}", about.mode() & 0o7777, about.uid());
        let path = path.display();
        return Err(usage(format!("{path} to be a file of this user with mode 0600"), got));
    }
    let mut secret = Vec::new();
    file.take(MAX_LEN).read_to_end(&mut secret).map_err(Error::system(named()))?;
    Ok(secret)
}

fn usage(expected: String, got: String) -> Error {
    Error::Usage { op: "connect", rank: None, expected, got }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opens(seal: &Seal, key: &str, sealed: &[u8]) -> bool {
        seal.open(key, sealed.to_vec(), "the store").is_ok()
    }

    #[test]
    fn a_sealed_value_opens_under_its_key_in_its_job_and_nowhere_else() {
        let seal = Seal::new(b"0123456789abcdef", "job");
        let sealed = seal.close("address/1", b"value");
        assert_eq!(seal.open("address/1", sealed.clone(), "").unwrap(), b"value");
        assert!(!opens(&seal, "address/2", &sealed));
        assert!(!opens(&Seal::new(b"0123456789abcdef", "other"), "address/1", &sealed));
        assert!(!opens(&Seal::new(b"0123456789abcdeg", "job"), "address/1", &sealed));
        for bit in 0..8 * sealed.len() {
            let mut forged = sealed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert!(!opens(&seal, "address/1", &forged), "bit {bit}");
        }
        for len in 0..sealed.len() {
            assert!(!opens(&seal, "address/1", &sealed[..len]), "{len} bytes");
        }
    }

    #[test]
    fn without_a_secret_values_go_as_they_are_and_tokens_are_the_jobs() {
        let seal = Seal::new(&[], "job");
        assert_eq!(seal.close("k", b"v"), b"v");
        assert_eq!(seal.open("k", b"v".to_vec(), "").unwrap(), b"v");
        assert_eq!(seal.token(7), Seal::new(&[], "job").token(7));
        assert_ne!(seal.token(7), Seal::new(&[], "other").token(7));
        assert_ne!(seal.token(7), Seal::new(b"0123456789abcdef", "job").token(7));
    }

    #[test]
    fn keys_for_other_things_differ_by_secret_job_and_purpose() {
        let key = |secret: &[u8], job, purpose| Seal::new(secret, job).derive(purpose).unwrap();
        let one = key(b"0123456789abcdef", "job", "this");
        assert_eq!(one, key(b"0123456789abcdef", "job", "this"));
        assert_ne!(one, key(b"0123456789abcdeg", "job", "this"));
        assert_ne!(one, key(b"0123456789abcdef", "other", "this"));
        assert_ne!(one, key(b"0123456789abcdef", "job", "that"));
        assert_eq!(Seal::new(&[], "job").derive("this"), None);
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("secret-{:x}", private::random().unwrap()));
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let set = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        set(0o644);
        let e = read_secret(&path).unwrap_err().to_string();
        assert!(e.contains("mode 0600") && e.contains("mode 0644"), "{e}");
        set(0o600);
        assert_eq!(read_secret(&path).unwrap(), b"0123456789abcdef\n");
        std::fs::remove_file(path).unwrap();
    }
}
