//! What the launcher holds in memory of what ranks write.

use super::super::*;

/// Lines of one byte each become several times as long with the rank before them.
#[test]
fn memory_stays_bounded_when_nobody_reads_what_ranks_write_without_end() {
    // Fills its pipe, which it makes as large as it can (F_SETPIPE_SZ), and ends when nobody makes room.
    let perl = "use Fcntl; fcntl(STDOUT, 1031, 1 << 20); fcntl(STDOUT, F_SETFL, O_NONBLOCK); \
                for (1..5) { 1 while syswrite(STDOUT, qq(\\n) x 4096); select(undef, undef, undef, 0.1) }";
    if !Command::new("perl").args(["-MFcntl", "-e", "1"]).output().is_ok_and(|o| o.status.success())
    {
        eprintln!("skipped: no perl");
        return;
    }
    let dir = scratch("memory");
    // Ranks that have ended leave a process that writes on. The launcher is their parent, and rank 0 looks at it when it
    // has nothing more to do.
    let script = format!(
        "[ $RANK != 0 ] && {{ perl -e '{perl}'; yes '' & yes '' >&2 & exit 0; }}; sleep 1; n=0; \
         while [ $n -lt 10 ]; do n=$((n+1)); sleep 0.1; \
         [ $(cut -d' ' -f3 /proc/$PPID/stat) = S ] || n=0; done; \
         grep VmHWM /proc/$PPID/status > $DIR/new; mv $DIR/new $DIR/most; exec yes ''"
    );
    let mut command = job(16, &["--grace", "0.2"], &script);
    command.env("DIR", &dir);
    let mut launched = Launched::start(command);
    until("measured", || dir.join("most").exists());
    let most = std::fs::read_to_string(dir.join("most")).unwrap();
    let kib: usize = most.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 40 << 10, "{most}");
    launched.send(Signal::TERM);
    launched.end();
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_ranks_wrote_before_they_ended_reaches_a_reader_who_comes_late() {
    let script = "head -c 60000 /dev/zero | tr '\\0' x | fold -w 1";
    let mut launched = Launched::start(job(24, &[], script));
    sleep(Duration::from_millis(500));
    let mut bytes = Vec::new();
    launched.0.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(launched.end().0, Some(0));
    assert_eq!(bytes.iter().filter(|&&byte| byte == b'x').count(), 24 * 60_000);
}
