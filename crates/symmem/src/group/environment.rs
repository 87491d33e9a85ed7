//! What the environment says about this rank: torchrun's variables, or those of an MPI or Slurm launcher.

use crate::error::{Error, Result};
use crate::private;

/// What the launcher assigned to this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) local_rank: usize,
    /// `host:port` of the store.
    pub(super) store: Option<String>,
    /// The launcher hosts the store; otherwise rank 0 does.
    pub(super) store_is_hosted: bool,
}

/// The variables of one launcher.
struct Family {
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    /// How many ranks, or for Slurm nodes, there are here and in all, where that tells that all are on this machine.
    all_here: (&'static str, &'static str),
}

/// In order of preference.
const FAMILIES: [Family; 4] = [
    Family {
        name: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        all_here: ("", ""),
    },
    Family {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        all_here: ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    },
    Family {
        name: "PMI",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        all_here: ("MPI_LOCALNRANKS", "PMI_SIZE"),
    },
    Family {
        name: "Slurm",
        rank: "SLURM_PROCID",
        // Not SLURM_NTASKS, which a batch script sees as well although it is no task of a step.
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        all_here: ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
    },
];

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the environment; a world of one where it says nothing.
pub(super) fn read(var: Lookup<'_>) -> Result<Assignment> {
    let mut found = Vec::new();
    for family in &FAMILIES {
        if let Some((rank, size)) = family.read(var)? {
            found.push((family, rank, size));
        }
    }
    let Some(&(family, rank, size)) = found.first() else { return Ok(alone()) };
    // torchrun started by another launcher speaks for its own job; anything else is a leftover of some shell.
    let trusted = family.name == "torchrun" && var("TORCHELASTIC_RUN_ID").is_some();
    let other = found.iter().find(|(_, r, s)| (*r, *s) != (rank, size)).filter(|_| !trusted);
    if let Some(&(other, r, s)) = other {
        return Err(usage(
            "launchers that agree; unset the variables of one".into(),
            format!(
                "rank {rank} of {size} from {} and rank {r} of {s} from {}",
                family.name, other.name
            ),
        ));
    }
    Ok(Assignment {
        rank,
        size,
        local_rank: number(family.local_rank, var)?.unwrap_or(rank),
        store: store_address(size, family, var)?,
        store_is_hosted: var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True"),
    })
}

fn alone() -> Assignment {
    Assignment { rank: 0, size: 1, local_rank: 0, store: None, store_is_hosted: false }
}

impl Family {
    fn all_are_here(&self, var: Lookup<'_>) -> bool {
        let (here, in_all) = self.all_here;
        var(here).is_some_and(|here| !here.is_empty() && Some(here) == var(in_all))
    }

    fn read(&self, var: Lookup<'_>) -> Result<Option<(usize, usize)>> {
        match (number(self.rank, var)?, number(self.size, var)?) {
            (Some(rank), Some(size)) if rank < size => Ok(Some((rank, size))),
            (Some(rank), Some(size)) => Err(usage(
                format!("{} below {}", self.rank, self.size),
                format!("{rank} and {size}"),
            )),
            (None, None) => Ok(None),
            // Slurm's rank alone is seen in batch scripts, outside any step.
            (Some(_), None) if self.name == "Slurm" => Ok(None),
            (rank, _) => {
                let (set, unset) =
                    if rank.is_some() { (self.rank, self.size) } else { (self.size, self.rank) };
                Err(usage(
                    format!("{} and {} both set, or neither", self.rank, self.size),
                    format!("{set} without {unset}"),
                ))
            }
        }
    }
}

/// A socket that all children of our parent, the launcher's process on this machine, know without being told, in a directory
/// that no other user may enter.
fn siblings_store() -> Result<String> {
    let parent = std::os::unix::process::parent_id();
    // Process ids come round again; together with the time of its start one is unique.
    let stat = std::fs::read_to_string(format!("/proc/{parent}/stat")).unwrap_or_default();
    let start =
        stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or("0");
    let directory = private::own_directory().map_err(|e| Error::Unavailable {
        what: "a store for the ranks of this launcher".into(),
        why: format!("{e}; set XDG_RUNTIME_DIR or TMPDIR, or MASTER_ADDR and MASTER_PORT"),
    })?;
    Ok(format!("unix:{}/store-{parent}-{start}", directory.path().display()))
}

fn store_address(size: usize, family: &Family, var: Lookup<'_>) -> Result<Option<String>> {
    let address = var("MASTER_ADDR").filter(|a| !a.is_empty());
    let port = var("MASTER_PORT").filter(|p| !p.is_empty());
    match (address, port) {
        (Some(address), _) if address.starts_with("unix:") => Ok(Some(address)),
        (Some(address), Some(port)) => {
            let port: u16 = port
                .parse()
                .map_err(|_| usage("a port number in MASTER_PORT".into(), format!("{port:?}")))?;
            let literal = address.contains(':') && !address.starts_with('[');
            Ok(Some(if literal {
                format!("[{address}]:{port}")
            } else {
                format!("{address}:{port}")
            }))
        }
        _ if size == 1 => Ok(None),
        (None, _) if family.all_are_here(var) => siblings_store().map(Some),
        (address, _) => Err(usage(
            format!(
                "MASTER_ADDR and MASTER_PORT, where the {size} ranks of {} find each other",
                family.name
            ),
            if address.is_some() { "MASTER_ADDR alone".into() } else { "no MASTER_ADDR".into() },
        )),
    }
}

fn number(name: &str, var: Lookup<'_>) -> Result<Option<usize>> {
    let parse = |text: String| {
        text.trim().parse().map_err(|_| usage(format!("a number in {name}"), format!("{text:?}")))
    };
    var(name).filter(|text| !text.is_empty()).map(parse).transpose()
}

fn usage(expected: String, got: String) -> Error {
    Error::Usage { op: "World::from_env", rank: None, expected, got }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(vars: &[(&str, &str)]) -> Result<Assignment> {
        read(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    fn error(vars: &[(&str, &str)]) -> String {
        assignment(vars).unwrap_err().to_string()
    }

    const STORE: [(&str, &str); 2] = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];

    fn with_store(vars: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        vars.iter().copied().chain(STORE).collect()
    }

    #[test]
    fn without_variables_it_is_a_world_of_one() {
        assert_eq!(assignment(&[]).unwrap(), alone());
    }

    #[test]
    fn every_launcher_is_understood() {
        for (rank, size) in [
            ("RANK", "WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ] {
            let got = assignment(&with_store(&[(rank, "2"), (size, "4")])).unwrap();
            assert_eq!((got.rank, got.size, got.local_rank), (2, 4, 2), "{rank}");
            assert_eq!(got.store.as_deref(), Some("10.0.0.1:29500"));
        }
    }

    #[test]
    fn torchrun_comes_first_and_its_agent_hosts_the_store() {
        let got = assignment(&with_store(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("TORCHELASTIC_RUN_ID", "x"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "1"),
        ]))
        .unwrap();
        assert_eq!((got.rank, got.size, got.local_rank), (1, 2, 0));
        assert!(got.store_is_hosted);
    }

    #[test]
    fn half_set_variables_are_named() {
        assert_eq!(
            error(&[("RANK", "0")]),
            "World::from_env: expected RANK and WORLD_SIZE both set, or neither, got RANK without WORLD_SIZE"
        );
        assert!(error(&[("PMI_SIZE", "4")]).contains("PMI_SIZE without PMI_RANK"));
        assert!(error(&[("RANK", "0"), ("WORLD_SIZE", "2")]).contains("no MASTER_ADDR"));
        let no_port = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")];
        assert!(error(&no_port).contains("MASTER_ADDR alone"));
    }

    #[test]
    fn contradictions_are_named() {
        assert!(
            error(&with_store(&[("RANK", "4"), ("WORLD_SIZE", "4")]))
                .contains("RANK below WORLD_SIZE")
        );
        let two = [
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
        ];
        assert!(error(&two).contains("rank 0 of 1 from torchrun and rank 3 of 4 from Open MPI"));
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        assert!(error(&[("RANK", "first"), ("WORLD_SIZE", "2")]).contains("a number in RANK"));
        assert!(error(&[("RANK", "-1"), ("WORLD_SIZE", "2")]).contains("\"-1\""));
        let port =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "99999")];
        assert!(error(&port).contains("a port number"));
    }

    #[test]
    fn ranks_of_one_launcher_on_one_machine_need_no_address() {
        let vars = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2")];
        let store = assignment(&vars).unwrap().store.unwrap();
        let path = std::path::Path::new(store.strip_prefix("unix:").unwrap());
        assert!(path.is_absolute(), "{store}");
        let directory = std::fs::symlink_metadata(path.parent().unwrap()).unwrap();
        use std::os::unix::fs::MetadataExt;
        assert_eq!((directory.mode() & 0o7777, directory.uid()), (0o700, private::user()));
        let spread = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "1")];
        assert!(error(&spread).contains("no MASTER_ADDR"));
    }

    #[test]
    fn a_batch_script_of_slurm_is_no_step() {
        assert_eq!(assignment(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).unwrap(), alone());
    }

    #[test]
    fn an_ipv6_address_gets_its_brackets() {
        let vars =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")];
        assert_eq!(assignment(&vars).unwrap().store.as_deref(), Some("[::1]:1"));
    }
}
