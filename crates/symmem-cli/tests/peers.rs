//! `symmem bench --peers` with peers that are scripts.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Two that answer, in every way there is, and one that is not there. A time of 10 s is slower than anything.
const SCRIPT: &str = r#"
line() { # NAME VERIFIED MEDIAN
  echo "{\"system\":\"$1\",\"collective\":\"broadcast\",\"ranks\":$ranks,\"bytes\":$PEERS_BYTES,\"dtype\":\"$PEERS_DTYPE\"," \
    "\"backend\":\"-\",\"memory\":\"slices\",\"algorithm\":\"-\",\"samples\":9,\"median_us\":$3,\"p10_us\":$3,\"p90_us\":$3," \
    "\"verified\":$2,\"near\":0.0,\"as_near\":false,\"round\":$PEERS_ROUND}"
  echo "{\"system\":\"$1\",\"collective\":\"broadcast\",\"ranks\":$ranks,\"bytes\":$PEERS_BYTES,\"dtype\":\"$PEERS_DTYPE\"," \
    "\"backend\":\"-\",\"memory\":\"slices\",\"algorithm\":\"-\",\"samples\":9,\"median_us\":$3,\"p10_us\":$3,\"p90_us\":$3," \
    "\"verified\":$2,\"near\":1.0,\"as_near\":true,\"round\":$PEERS_ROUND}"
}
ranks=${3-}
case "$1 ${2-}" in
"list ")
  printf '%s\n' "fast ready f32 bf16" "slow ready f32" "absent missing" "liar ready" "noisy ready" "broken ready" "mute ready"
  ;;
"run fast") line fast true 10000000 ;;
"run slow") line slow true 20000000 ;;
"run liar") line liar false 0.001 ;;
"run noisy") echo "what is this" && line fast true 0.001 ;;
"run broken") exit 3 ;;
"run mute") ;;
esac
"#;

fn directory(test: &str, script: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("symmem-peers-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("peers.sh"), script).unwrap();
    path
}

#[test]
fn peers_land_in_the_table_and_what_goes_wrong_with_them_is_said() {
    let directory = directory("table", SCRIPT);
    let json = directory.join("figures.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(["bench", "broadcast", "--quick", "--rounds", "1", "--bytes", "64"]);
    command.args(["--dtype", "f32,bf16", "--json", json.to_str().unwrap()]);
    command.arg(format!("--peers={}", directory.display())).stdin(Stdio::null());
    let output = command.output().unwrap();
    let figures = std::fs::read_to_string(&json).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");

    assert!(out.contains("best peer / ours"), "{out}");
    for dtype in [" f32 ", " bf16 "] {
        let row = out.lines().find(|line| line.contains("broadcast") && line.contains(dtype));
        let cells: Vec<_> = row.unwrap().split('┆').map(|c| c.trim_matches([' ', '│'])).collect();
        assert_eq!(cells[10], "fast", "{out}");
        assert!(cells[12].parse::<f64>().unwrap() > 1.0, "{out}");
    }
    for said in [
        "peers measured: fast, slow\n",
        "peers without a type: slow (bf16)\n",
        "peer liar was wrong: broadcast of 64 bytes\n",
        "peer noisy wrote what is no figure of its own: what is this\n",
        "peer noisy wrote what is no figure of its own: {\"system\":\"fast\"",
        "peer broken failed: exit code 3\n",
        "peer mute gave nothing\n",
        "install NAME): absent\n",
    ] {
        assert!(out.contains(said), "no {said:?} in\n{out}\n{err}");
    }
    let of = |name: &str| figures.matches(&format!("\"system\":\"{name}\"")).count();
    assert_eq!([of("fast"), of("slow"), of("liar"), of("noisy")], [4, 2, 0, 0], "{figures}");
}

#[test]
fn a_directory_without_peers_is_refused_before_anything_starts() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output = command.args(["bench", "barrier", "--peers=/nowhere"]).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.contains("/nowhere/peers.sh"), "{err}");
    assert!(!err.contains(", round"), "{err}");
}

/// Three between hosts: one whose commands look where they run, and which sends from the first host to the second; one that has
/// the same figures and sends to itself; and one that is too fast.
const BETWEEN: &str = r#"
line() { # NAME BYTES MEDIAN
  echo "{\"system\":\"$1\",\"collective\":\"barrier\",\"ranks\":2,\"bytes\":$2,\"dtype\":\"-\"," \
    "\"backend\":\"-\",\"memory\":\"-\",\"algorithm\":\"-\",\"samples\":20000,\"median_us\":$3,\"p10_us\":$3,\"p90_us\":$3," \
    "\"verified\":true,\"near\":0.0,\"as_near\":false,\"round\":$PEERS_ROUND}"
}
on() { "$HOST_SH" -x "host-$1" "$2"; }
send() { on 0 "dd if=/dev/zero bs=30000 count=1 status=none >/dev/udp/$1/9"; } # a byte a sample, and more
case "$1 ${2-}" in
"list ") [ "$PEERS_HOSTS" = 2 ] && printf '%s\n' "placed ready" "stray ready" "hasty ready" ;;
"run placed")
  for host in 0 1; do
    here=$(on $host 'hostname; ip -4 -o addr show cable | grep -o "inet [0-9.]*"; getent hosts host-1 | grep -o "[^ ]*$"; ls -A /dev/shm')
    there=$(printf '%s\n' "host-$host" "inet 10.213.77.$((host + 1))" host-1 .hosts)
    [ "$here" = "$there" ] || { echo "host $host has: $here"; exit; }
  done
  [ "$(on 0 'readlink /proc/self/ns/net')" = "$(readlink /proc/self/ns/net)" ] || echo "not started on the first host"
  [ "$(on 1 'readlink /proc/self/ns/net')" != "$(readlink /proc/self/ns/net)" ] || echo "two hosts are one"
  on 1 'exit 7'
  [ $? = 7 ] || echo "another exit status"
  send 10.213.77.2
  line placed 0 10000000
  ;;
"run stray") send 127.0.0.1 && line stray 0 0.1 ;;
"run hasty") send 10.213.77.2 && line hasty 0 0.1 ;;
esac
"#;

#[test]
fn between_hosts_peers_run_in_the_namespaces_or_are_left_out() {
    let can = Command::new("unshare").args(["-n", "ip", "link"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: network namespaces need root and ip");
        return;
    }
    let directory = directory("between", BETWEEN);
    let json = directory.join("figures.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(["bench", "barrier", "--hosts", "2", "--rate", "1gbit", "--quick", "--rounds"]);
    command.args(["1", "--json", json.to_str().unwrap()]);
    command.arg(format!("--peers={}", directory.display())).stdin(Stdio::null());
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/peers/host.sh");
    let output = command.env("HOST_SH", tool).output().unwrap();
    let figures = std::fs::read_to_string(&json).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("peers measured: placed\n"), "{out}{err}");
    assert!(!out.contains("no figure of its own"), "{out}{err}");
    assert!(out.contains("peer stray is left out: "), "{out}{err}");
    let row = out.lines().find(|line| line.contains("barrier")).unwrap();
    assert!(row.contains(" placed "), "{out}");
    for said in [
        "bytes passed between the hosts, and not 20000",
        "hasty is left out: its barrier takes 0.1 µs",
    ] {
        assert!(out.contains(said), "no {said:?} in\n{out}");
    }
    let placed: Vec<_> = figures.lines().filter(|line| line.contains("placed")).collect();
    assert_eq!(placed.len(), 1, "{figures}");
    for said in ["\"hosts\":2", "\"network\":\"namespaces\"", "\"rate\":\"1gbit\""] {
        assert!(placed[0].contains(said), "{figures}");
    }
    assert!(!figures.contains("stray") && !figures.contains("hasty"), "{figures}");
}

#[test]
fn between_hosts_in_name_only_peers_are_refused() {
    let directory = directory("loopback", "echo any ready");
    let bash = Command::new("sh").args(["-c", "command -v bash"]).output().unwrap();
    let bash = String::from_utf8(bash.stdout).unwrap();
    std::os::unix::fs::symlink(bash.trim(), directory.join("bash")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(["bench", "barrier", "--hosts", "2", "--quick"]).env("PATH", &directory);
    command.arg(format!("--peers={}", directory.display()));
    let output = command.output().unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{err}");
    assert!(err.contains("--peers with --hosts needs network namespaces: "), "{err}");
}

/// What every rank of a peer asks before it measures, here with another kind of namespace instead of another network.
#[test]
fn a_rank_of_a_peer_refuses_to_run_elsewhere_than_on_its_host() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/peers");
    let directory = directory("rank", "");
    let (main, program) = (directory.join("main.c"), directory.join("rank"));
    let text = "#include \"sync.h\"\nint main(void) { sync_init(0, 1); }\n";
    std::fs::write(&main, text).unwrap();
    std::fs::write(directory.join("region"), "").unwrap();
    let mut compile = Command::new("cc");
    compile.arg("-I").arg(&sources).arg(&main).arg(sources.join("sync.c"));
    let compiled = compile.arg("-o").arg(&program).arg("-lm").output();
    if !compiled.is_ok_and(|output| output.status.success()) {
        std::fs::remove_dir_all(&directory).unwrap();
        eprintln!("skipped: this needs a C compiler, for x86-64");
        return;
    }
    let run = |space: &str| {
        let mut command = Command::new(&program);
        command.env("PEERS_SPACES", space).env("PEERS_REGION", directory.join("region"));
        command.output().unwrap()
    };
    let (own, other) = (run("/proc/self/ns/net"), run("/proc/self/ns/uts"));
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(own.status.success(), "{own:?}");
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.contains("does not run on its host"), "{said}");
}
