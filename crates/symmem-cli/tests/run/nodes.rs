//! Several launchers, each a node of one job, on this machine.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::*;

/// The nodes of a job of `ranks` ranks each.
struct Nodes {
    port: String,
    ranks: usize,
    count: usize,
}

impl Nodes {
    fn new(count: usize, ranks: usize) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { port: port.to_string(), ranks, count }
    }

    fn command(&self, node: usize, options: &[&str], script: &str) -> Command {
        let (count, node) = (self.count.to_string(), node.to_string());
        let place = ["--nnodes", &count, "--node-rank", &node];
        let store = ["--master-addr", "127.0.0.1", "--master-port", &self.port];
        let mut command = job(self.ranks, &[&place[..], &store, options].concat(), script);
        command.env("SYMMEM_HOST", format!("host-{node}"));
        command
    }

    fn start(&self, options: &[&str], script: &str) -> Vec<Launched> {
        let commands = (0..self.count).map(|node| self.command(node, options, script));
        commands.map(Launched::start).collect()
    }
}

/// All ends, which must have come within a few seconds.
fn ends(mut launched: Vec<Launched>) -> Vec<(Option<i32>, String)> {
    let begin = Instant::now();
    let ends = launched.iter_mut().map(Launched::end).collect();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    ends
}

/// Whether all nodes ended with this code, and said that the job failed for this reason.
fn agree(ends: &[(Option<i32>, String)], code: i32, why: &str) {
    for (node, (ended, err)) in ends.iter().enumerate() {
        assert_eq!(*ended, Some(code), "node {node} of {ends:#?}");
        let verdicts: Vec<_> = err.lines().filter(|line| line.contains("the job failed")).collect();
        assert_eq!(
            verdicts,
            [format!("symmem: the job failed: {why}")],
            "node {node} of {ends:#?}"
        );
    }
}

#[test]
fn all_nodes_end_with_the_failure_of_one() {
    for (how, code, why) in [
        ("kill -KILL $$", 137, "rank 3 on node 1 was killed by SIGKILL"),
        ("exit 7", 7, "rank 3 on node 1 failed with exit code 7"),
    ] {
        let script = format!("[ $RANK = 3 ] && sleep 0.2 && {how}; exec sleep 1000");
        let ends = ends(Nodes::new(2, 2).start(&[], &script));
        agree(&ends, code, why);
        assert!(ends[0].1.contains("ending ranks 0, 1"), "{ends:?}");
        assert!(ends[1].1.contains("symmem: rank 3 "), "{ends:?}");
        assert!(!ends.iter().any(|(_, err)| err.contains("SIGTERM")), "{ends:?}");
    }
}

#[test]
fn the_failure_of_the_node_that_hosts_the_store_ends_the_others() {
    let script = "[ $RANK = 0 ] && sleep 0.2 && exit 9; exec sleep 1000";
    agree(
        &ends(Nodes::new(3, 1).start(&[], script)),
        9,
        "rank 0 on node 0 failed with exit code 9",
    );
}

/// As ranks do whose peer is lost: the one that was killed is the cause.
#[test]
fn ranks_that_give_up_for_a_killed_one_are_not_the_cause() {
    let dir = scratch("giving-up");
    let script = "if [ $RANK = 1 ]; then sleep 0.2; : > $DIR/gone; kill -SEGV $$; fi; \
                  while [ ! -e $DIR/gone ]; do sleep 0.01; done; exit 3";
    let nodes = Nodes::new(2, 1);
    let start = |node| {
        Launched::start({
            let mut command = nodes.command(node, &[], script);
            command.env("DIR", &dir);
            command
        })
    };
    let ends = ends(vec![start(0), start(1)]);
    for (code, err) in &ends {
        assert_eq!(*code, Some(139), "{ends:#?}");
        assert!(
            err.contains("the job failed: rank 1 on node 1 was killed by SIGSEGV"),
            "{ends:#?}"
        );
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_node_that_finished_ends_with_the_failure_of_another() {
    let script = "[ $GROUP_RANK = 1 ] && exit 0; sleep 0.7; exit 4";
    let why = "rank 0 on node 0 failed with exit code 4";
    agree(&ends(Nodes::new(2, 1).start(&[], script)), 4, why);
}

#[test]
fn nodes_that_all_finish_say_nothing() {
    let nodes = Nodes::new(2, 2);
    let secret = SecretFile::new("quiet");
    let launched = nodes.start(&secret.option(), "[ $GROUP_RANK = 0 ] && sleep 0.3; echo done");
    for (code, err) in ends(launched) {
        assert_eq!((code, err.as_str()), (Some(0), ""));
    }
}

#[test]
fn a_signal_to_one_node_ends_all() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let nodes = Nodes::new(2, 1);
        let script = "echo ready; exec sleep 1000";
        let (zero, _out) = Launched::ready(nodes.command(0, &[], script), 1);
        let (one, _out) = Launched::ready(nodes.command(1, &[], script), 1);
        one.send(signal);
        let ends = ends(vec![zero, one]);
        assert!(ends.iter().all(|(ended, _)| *ended == Some(code)), "{ends:#?}");
        assert!(ends[0].1.contains("node 1 was told to end by SIG"), "{ends:#?}");
    }
}

#[test]
fn the_other_nodes_end_when_the_one_with_the_store_is_killed() {
    let nodes = Nodes::new(2, 1);
    let script = "echo ready; exec sleep 1000";
    let (zero, _out) = Launched::ready(nodes.command(0, &[], script), 1);
    let (mut one, _out) = Launched::ready(nodes.command(1, &[], script), 1);
    sleep(Duration::from_millis(300)); // until it listens for news
    zero.send(Signal::KILL);
    let (code, err) = one.end();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("node 0 is gone"), "{err}");
}

#[test]
fn survivors_of_several_nodes_may_go_on() {
    let script = "[ $RANK = 1 ] && kill -KILL $$; sleep 0.5; echo finished";
    let ends = ends(Nodes::new(2, 2).start(&["--on-failure", "keep"], script));
    assert!(ends.iter().all(|(code, _)| *code == Some(0)), "{ends:#?}");
}

/// A file with a secret.
struct SecretFile(PathBuf);

impl SecretFile {
    fn new(test: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let path = scratch(test).join("secret");
        std::fs::write(&path, "correct horse battery staple\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        Self(path)
    }

    fn option(&self) -> [&str; 2] {
        ["--secret-file", self.0.to_str().unwrap()]
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
    }
}

#[test]
fn ranks_of_one_node_have_a_secret_of_their_own() {
    let script =
        "stat -L -c %a $SYMMEM_SECRET_FILE; cat $SYMMEM_SECRET_FILE; echo; echo env=$SYMMEM_SECRET";
    let secrets: Vec<String> = (0..2)
        .map(|_| {
            let output = run(2, script);
            let lines = sorted_lines(&output.stdout);
            let of = |rank| lines.iter().filter_map(move |line| line.strip_prefix(rank));
            let secret: Vec<_> = of("[0] ").filter(|line| line.len() == 32).collect();
            assert!(of("[0] ").eq(of("[1] ")), "{lines:?}");
            assert!(of("[0] ").any(|line| line == "600") && of("[0] ").any(|line| line == "env="));
            secret.concat()
        })
        .collect();
    assert!(secrets[0].len() == 32 && secrets[0] != secrets[1], "{secrets:?}");
}

#[test]
fn a_secret_of_the_user_is_the_one() {
    let script = "echo $SYMMEM_SECRET+$SYMMEM_SECRET_FILE";
    let mut command = job(1, &[], script);
    let output = command.env("SYMMEM_SECRET", "0123456789abcdef").output().unwrap();
    assert_eq!(text(&output.stdout), "[0] 0123456789abcdef+\n");
    let secret = SecretFile::new("given");
    let mut command = job(1, &secret.option(), script);
    let output = command.env("SYMMEM_SECRET", "0123456789abcdef").output().unwrap();
    let path = secret.0.canonicalize().unwrap();
    assert_eq!(text(&output.stdout), format!("[0] +{}\n", path.display()), "{output:?}");
}

#[test]
fn a_secret_that_others_can_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let secret = SecretFile::new("public");
    std::fs::set_permissions(&secret.0, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = job(1, &secret.option(), "true").output().unwrap();
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("0600"), "{err}");
    std::fs::remove_file(&secret.0).unwrap();
    let output = job(1, &secret.option(), "true").output().unwrap();
    assert!(text(&output.stderr).contains("No such file"), "{output:?}");
}

#[test]
fn nodes_without_a_secret_are_warned() {
    let ends = ends(Nodes::new(2, 1).start(&[], "exit 0"));
    assert!(ends.iter().all(|(code, _)| *code == Some(0)), "{ends:#?}");
    assert!(ends[0].1.contains("--secret-file") && ends[1].1.is_empty(), "{ends:#?}");
}

#[test]
fn ucx_is_told_to_leave_the_process_alone_unless_the_user_says_otherwise() {
    let mut command = job(1, &[], "echo $UCX_MEM_EVENTS $UCX_HANDLE_ERRORS $UCX_LOG_FILE");
    command.env_remove("UCX_MEM_EVENTS").env("UCX_HANDLE_ERRORS", "bt");
    assert_eq!(text(&command.output().unwrap().stdout), "[0] n bt stderr\n");
    let mut command = job(1, &[], "echo $UCX_MEM_EVENTS $UCX_HANDLE_ERRORS $UCX_LOG_FILE");
    command.env_remove("UCX_HANDLE_ERRORS").env("UCX_MEM_EVENTS", "y");
    assert_eq!(text(&command.output().unwrap().stdout), "[0] y none stderr\n");
}

/// Ranks that compute together, with the library, as a program of the user does.
#[test]
fn a_world_spans_the_nodes() {
    let secret = SecretFile::new("world");
    let nodes = Nodes::new(2, 2);
    let own = env!("CARGO_BIN_EXE_symmem");
    // What `symmem bench` runs: joins the world and says how many ranks are in it.
    let launched = nodes.start(&secret.option(), &format!("exec {own} bench-rank"));
    for mut one in launched {
        let mut out = String::new();
        one.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        let (code, err) = one.end();
        assert_eq!((code, err.as_str()), (Some(0), ""));
        assert_eq!(out.lines().filter(|line| line.ends_with("] 4")).count(), 2, "{out}");
    }
}
