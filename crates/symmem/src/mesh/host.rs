//! Which ranks are on one host: those with the same identity.

use crate::error::{Error, Result};

pub(super) const HOST: &str = "SYMMEM_HOST";
const LONGEST: usize = 64;

/// The identity of this host: `SYMMEM_HOST`, or the boot id. Host names repeat. Boot ids repeat where ranks run in network
/// namespaces of one machine, or in copies of one running machine.
pub(super) fn identity() -> Result<String> {
    match std::env::var_os(HOST).filter(|set| !set.is_empty()) {
        Some(set) => checked(&set.to_string_lossy()),
        None => Ok(boot_id()),
    }
}

fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_end().to_owned()
}

fn checked(name: &str) -> Result<String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if name.len() <= LONGEST && name.chars().all(fits) {
        return Ok(name.to_owned());
    }
    let expected =
        format!("{HOST} to have at most {LONGEST} characters: letters, digits and any of -_.:");
    Err(Error::Usage { op: super::connect::OP, rank: None, expected, got: format!("{name:?}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_other_characters_or_too_many_is_refused_by_its_variable() {
        for name in ["node-7.rack_2", "fe80::1", &"h".repeat(LONGEST)] {
            assert_eq!(checked(name).unwrap(), name);
        }
        for name in ["two words", "a/b", "höst", "line\n", &"h".repeat(LONGEST + 1)] {
            let e = checked(name).unwrap_err().to_string();
            assert!(e.contains("SYMMEM_HOST") && e.contains("at most 64"), "{e}");
        }
    }

    #[test]
    fn without_a_name_it_is_the_boot_id() {
        assert_eq!(boot_id().len(), 36);
    }
}
