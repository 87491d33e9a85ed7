//! How much memory the control groups of this process leave it. Beyond it the kernel ends a process instead of refusing.

use std::path::{Path, PathBuf};

/// The least that any control group of this process has left, and which one that is.
pub(super) fn memory_left() -> Option<(usize, PathBuf)> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    memory_left_in(Path::new("/sys/fs/cgroup"), &own)
}

/// The names of one version's files.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Counts in `memory.stat` of what can be dropped at any time: pages of files.
    droppable: [&'static str; 2],
}

const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    droppable: ["active_file", "inactive_file"],
};
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: ["total_active_file", "total_inactive_file"],
};

/// As [`memory_left`], where groups are mounted at `root` and `own` is what the process reads of itself.
fn memory_left_in(root: &Path, own: &str) -> Option<(usize, PathBuf)> {
    let groups = own.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        match controllers {
            "" => Some((V2, [root.to_owned(), root.join("unified")], path)),
            _ if controllers.split(',').any(|c| c == "memory") => {
                Some((V1, [root.join("memory"), root.join(controllers)], path))
            }
            _ => None,
        }
    });
    let left = groups.flat_map(|(files, mounts, path)| {
        mounts.into_iter().flat_map(move |mount| least_left(&files, &mount, path))
    });
    left.min()
}

/// What the group at `path` and its ancestors have left, up to the mount itself.
fn least_left(files: &Files, mount: &Path, path: &str) -> Option<(usize, PathBuf)> {
    // In a container the path may be that of the host, and the mount the container's own group.
    let own = mount.join(path.trim_start_matches('/'));
    let within = own.ancestors().take_while(|group| group.starts_with(mount));
    within.filter_map(|group| Some((files.left(group)?, group.to_owned()))).min()
}

impl Files {
    /// `None` where the group has no limit, or is none.
    fn left(&self, group: &Path) -> Option<usize> {
        let read = |name| std::fs::read_to_string(group.join(name)).ok();
        let number = |text: String| text.trim().parse::<usize>().ok();
        // "max" is no number, and so no limit.
        let (limit, usage) = (number(read(self.limit)?)?, number(read(self.usage)?)?);
        let stat = read("memory.stat").unwrap_or_default();
        let droppable = stat.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            self.droppable.contains(&name).then(|| bytes.trim().parse::<usize>().ok())?
        });
        Some(limit.saturating_sub(usage.saturating_sub(droppable.sum())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up tree of groups: paths and contents.
    fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("cgroup-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        }
        root
    }

    #[test]
    fn the_narrowest_ancestor_counts() {
        let root = tree(
            "v2",
            &[
                ("memory.current", "5"),
                ("a/memory.max", "1000"),
                ("a/memory.current", "900"),
                ("a/memory.stat", "anon 700\nactive_file 20\ninactive_file 30\nshmem 9"),
                ("a/b/memory.max", "max"),
                ("a/b/memory.current", "10"),
                ("a/b/c/memory.max", "5000"),
                ("a/b/c/memory.current", "10"),
                ("other/memory.max", "1"),
                ("other/memory.current", "1"),
            ],
        );
        assert_eq!(memory_left_in(&root, "0::/a/b/c\n"), Some((150, root.join("a"))));
        assert_eq!(memory_left_in(&root, "0::/a/b/gone\n"), Some((150, root.join("a"))));
        assert_eq!(memory_left_in(&root, "0::/other\n"), Some((0, root.join("other"))));
        assert_eq!(memory_left_in(&root, "0::/\n"), None);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_first_version_counts_too_and_a_usage_above_the_limit_leaves_nothing() {
        let root = tree(
            "v1",
            &[
                ("memory/memory.limit_in_bytes", "9223372036854771712"),
                ("memory/memory.usage_in_bytes", "4096"),
                ("memory/job/memory.limit_in_bytes", "1000"),
                ("memory/job/memory.usage_in_bytes", "400"),
                ("memory/job/memory.stat", "cache 1\ntotal_inactive_file 100"),
                ("memory/full/memory.limit_in_bytes", "1000"),
                ("memory/full/memory.usage_in_bytes", "1001"),
            ],
        );
        let own = |path| format!("5:cpu,cpuacct:/job\n4:memory:{path}\n0::/\n");
        assert_eq!(memory_left_in(&root, &own("/job")), Some((700, root.join("memory/job"))));
        assert_eq!(memory_left_in(&root, &own("/full")), Some((0, root.join("memory/full"))));
        // The path of the host, in a container whose own group is mounted.
        assert!(
            memory_left_in(&root, &own("/docker/1234")).is_some_and(|(left, _)| left > 1 << 40)
        );
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn nonsense_is_no_limit() {
        let root = tree("odd", &[("a/memory.max", "many"), ("a/memory.current", "")]);
        for own in ["", "0::", "x", "0::/a", "4:memory", "::::"] {
            assert_eq!(memory_left_in(&root, own), None, "{own:?}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
