//! `symmem bench --peers` with peers that are scripts.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::PathBuf;
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

fn directory() -> PathBuf {
    let path = std::env::temp_dir().join(format!("symmem-peers-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("peers.sh"), SCRIPT).unwrap();
    path
}

#[test]
fn peers_land_in_the_table_and_what_goes_wrong_with_them_is_said() {
    let directory = directory();
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
