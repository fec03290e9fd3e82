//! A server that is killed and has forgotten what it had answered.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::daemon::{Client, Host};

/// nbdkit's disk in memory.
struct Memory {
    socket: PathBuf,
    kit: Child,
}

impl Memory {
    fn start(socket: &Path) -> Memory {
        fs::remove_file(socket).ok();
        let mut kit = Command::new("nbdkit");
        kit.args(["-f", "--exit-with-parent", "-U"]).arg(socket).args(["memory", "8M"]);
        let kit = kit.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let memory = Memory { socket: socket.to_owned(), kit: kit.spawn().unwrap() };
        let end = Instant::now() + Duration::from_secs(120);
        while !socket.exists() {
            assert!(Instant::now() < end, "nbdkit does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        memory
    }

    fn start_anew(&mut self) {
        self.stop();
        *self = Memory::start(&self.socket);
    }

    fn stop(&mut self) {
        self.kit.kill().ok();
        self.kit.wait().ok();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stop();
    }
}

fn losses(host: &Host) -> u64 {
    let (code, text) = host.ask(&["status", "--json"]);
    assert_eq!(code, Some(0), "{text}");
    let status: serde_json::Value = serde_json::from_str(&text).unwrap();
    status["volumes"][0]["store"]["losses"].as_u64().unwrap()
}

/// Each has written, or not, and been answered; then the server is killed and started anew. The first flush of each fails, the
/// second succeeds; what was written is gone for all.
fn forgets(placement: &str, threads: &str) {
    let dir = TempDir::new().unwrap();
    let mut store = Memory::start(&dir.path().join("kit"));
    let uri = format!("nbd+unix:///?socket={}", dir.path().join("kit").display());
    let host = Host::placing(placement, dir.path(), "a", &uri, &["--threads", threads]);
    let mut running = host.start();
    let mut clients: Vec<Client> = (0..3).map(|_| running.client()).collect();
    for round in 1..=2u8 {
        clients[0].write(0, 4096, 2 * round);
        clients[1].write(4096, 4096, 2 * round + 1);
        // The third one is there, and only looks.
        assert_eq!(clients[2].read(4096, 4096), 2 * round + 1);
        running.settle();
        store.start_anew();
        // The store is gone, and so may be what it had.
        let order = if round == 1 { [1, 0, 2] } else { [2, 0, 1] };
        for at in order {
            let failure = clients[at].flush().expect_err("it has lost writes");
            assert!(failure.message.contains("lost writes"), "client {at}: {failure}");
            // Who has heard of it finds what the store has.
            for at in &mut clients {
                assert_eq!((at.read(0, 4096), at.read(4096, 4096)), (0, 0));
            }
        }
        for client in &mut clients {
            client.flush().unwrap();
        }
        assert_eq!(losses(&host), u64::from(round));
        running.wait_for("its store may have lost writes");
        // Who comes afterwards has lost nothing.
        running.client().flush().unwrap();
    }
    // What was flushed is not the less there for a server that comes and goes: it is nobody's loss.
    clients[0].write(8192, 4096, 9);
    clients[0].flush().unwrap();
    running.settle();
    store.start_anew();
    clients.iter_mut().for_each(|client| client.flush().unwrap());
    assert_eq!(losses(&host), 2);
    drop(clients);
    running.stop();
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn every_client_of_a_server_that_forgets_is_told_once() {
    forgets("set:8", "2");
    forgets("set:8", "1");
    forgets("sparse", "2");
}
