//! The other process of a test: this program again, which sends every message back.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use symmem_sys::ucx::{
    Answer, Body, Data, Endpoint, Engine, Events, Failure, ReceiveBuffer, Result, Settings, Ucx,
};

const PEER: &str = "SYMMEM_TEST_UCX_PEER";

pub fn settings() -> Settings {
    // All devices: not every version reaches this machine by `lo` alone.
    Settings { transports: Some("tcp".to_owned()), ..Settings::default() }
}

/// Another process with an engine.
pub struct Peer {
    child: Child,
    /// Closed, it ends the process.
    input: Option<ChildStdin>,
    /// Open as long as the process may write to it.
    _output: BufReader<ChildStdout>,
    pub address: Vec<u8>,
}

impl Peer {
    /// Starts it, and gives it the address of an engine here.
    pub fn start(ours: &[u8]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["peer::the_other_process", "--exact", "--nocapture"])
            .env(PEER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "{}", to_hex(ours)).unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let lines = output.by_ref().lines().map_while(std::result::Result::ok);
        // The harness says its own things before it on the same line.
        let find = |line: String| Some(from_hex(line.split_once("address ")?.1));
        let address = { lines }.find_map(find).unwrap();
        Self { child, input: Some(input), _output: output, address }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Sends back what comes.
#[derive(Default)]
struct Echo {
    back: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
    headers: Mutex<Vec<Vec<u8>>>,
}

impl Events for Echo {
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer {
        match data {
            Data::Inline(bytes) => {
                self.back.lock().unwrap().push((header.to_vec(), bytes.to_vec()));
                Answer::Done
            }
            Data::Rendezvous(bytes) => {
                let mut headers = self.headers.lock().unwrap();
                headers.push(header.to_vec());
                Answer::Receive {
                    buffer: ReceiveBuffer::new(bytes),
                    token: headers.len() as u64 - 1,
                }
            }
        }
    }

    fn received(&self, token: u64, buffer: ReceiveBuffer, result: Result<()>) {
        if result.is_ok() {
            let header = self.headers.lock().unwrap()[token as usize].clone();
            self.back.lock().unwrap().push((header, buffer.into_bytes().unwrap()));
        }
    }

    fn sent(&self, _: u64, _: Result<()>) {}

    fn failed(&self, _: Endpoint, _: Failure) {}
}

#[test]
fn the_other_process() {
    if std::env::var_os(PEER).is_none() {
        return;
    }
    let ucx: Arc<Ucx> = symmem_sys::ucx::load().unwrap();
    let echo = Arc::new(Echo::default());
    let engine = ucx.start(&settings(), echo.clone()).unwrap();
    println!("address {}", to_hex(engine.address()));
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut line).unwrap();
    let back = engine.connect(&from_hex(line.trim())).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let told = over.clone();
    std::thread::spawn(move || {
        let _ = input.read_to_end(&mut Vec::new());
        told.store(true, Ordering::Relaxed);
    });
    while !over.load(Ordering::Relaxed) {
        engine.progress().unwrap();
        let messages = std::mem::take(&mut *echo.back.lock().unwrap());
        for (header, body) in messages {
            // The peer may be gone.
            let _ = engine.post(back, &header, Body::from(body), 0);
        }
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len() / 2).map(|byte| digits(byte * 2)).collect()
}
