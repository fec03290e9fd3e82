//! `larder block serve` over TLS, with other people's clients: libnbd's (GnuTLS) and QEMU's.
//!
//! Without them its tests are ignored.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::daemon::{Daemon, larder, prepare, read, session};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// A program's end and what it printed.
fn run(program: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new("timeout")
        .args(["60", program])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn works(program: &str, arguments: &[&str]) -> String {
    let (good, text) = run(program, arguments);
    assert!(good, "{program} {arguments:?}: {text}");
    text
}

/// An authority.
fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate and its key as `who-cert.pem` and `who-key.pem`, the names that libnbd and QEMU look for.
fn issue(dir: &Path, who: &str, by: &CertifiedIssuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, by).unwrap();
    std::fs::write(dir.join(format!("{who}-cert.pem")), certificate.pem()).unwrap();
    std::fs::write(dir.join(format!("{who}-key.pem")), key.serialize_pem()).unwrap();
}

/// The ports that a daemon says it listens on.
fn ports(daemon: &Daemon) -> Vec<u16> {
    let line = daemon.seen.iter().find(|line| line.contains("ready: ")).unwrap();
    let port = |word: &str| word.trim_end_matches(',').rsplit_once(':')?.1.parse().ok();
    let ports: Vec<u16> = line.split(' ').filter_map(port).collect();
    // Each address once, as it can be connected to.
    assert!(
        ports.iter().all(|port| *port != 0 && line.matches(&format!(":{port}")).count() == 1),
        "{line}"
    );
    ports
}

#[test]
#[cfg_attr(
    any(without = "nbdinfo", without = "nbdcopy", without = "qemu-img"),
    ignore = "needs nbdinfo, nbdcopy and qemu-img (Debian: libnbd-bin, qemu-utils)"
)]
fn clients_with_and_without_certificates() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let folder = |name: &str| {
        let path = dir.join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let ours = authority("ours");
    let (good, anonymous, stranger) = (folder("good"), folder("anonymous"), folder("stranger"));
    issue(dir, "server", &ours);
    issue(&good, "client", &ours);
    issue(&stranger, "client", &authority("another"));
    for path in [dir, &good, &anonymous, &stranger] {
        std::fs::write(path.join("ca-cert.pem"), ours.pem()).unwrap();
    }
    let at = |name: &str| dir.join(name).display().to_string();
    let (certificate, key, ca) = (at("server-cert.pem"), at("server-key.pem"), at("ca-cert.pem"));
    let base = ["--tls-certificate", &certificate, "--tls-key", &key];

    for known_only in [false, true] {
        let mut flags = base.to_vec();
        if known_only {
            flags.extend(["--tls-client-ca", &ca]);
        }
        flags.extend(["--listen", "tcp:127.0.0.1:0", "--listen", "tcp:127.0.0.1:0,tls=off"]);
        let daemon = Daemon::start(dir, &flags);
        let [strict, free] = ports(&daemon)[..] else { panic!("{:?}", daemon.seen) };
        let tls = |files: &Path| {
            format!("nbds://localhost:{strict}/disk?tls-certificates={}", files.display())
        };
        let text = works("nbdinfo", &[&tls(&good)]);
        assert!(text.contains("newstyle-fixed with TLS") && text.contains("33554432"), "{text}");
        // In plain text: not where TLS is required, but where it is off, and on the Unix socket.
        let (good_end, text) = run("nbdinfo", &[&format!("nbd://127.0.0.1:{strict}/disk")]);
        assert!(!good_end && text.contains("TLS"), "{text}");
        works("nbdinfo", &[&format!("nbd://127.0.0.1:{free}/disk")]);
        let (good_end, text) =
            run("nbdinfo", &[&tls(&good).replace(&strict.to_string(), &free.to_string())]);
        assert!(!good_end, "{text}");
        assert_eq!(read(&mut *session(dir), 0, 4096).len(), 4096);
        // Somebody else's certificate, and none.
        for files in [&stranger, &anonymous] {
            let (good_end, text) = run("nbdinfo", &[&tls(files)]);
            assert_eq!(good_end, !known_only, "{text}");
        }
        // There and back, on several connections, as the store has it.
        let mut rng = larder_base::Rng::new(u64::from(known_only));
        let bytes: Vec<u8> = (0..4 << 20).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        std::fs::write(dir.join("from"), bytes).unwrap();
        works("nbdcopy", &["--connections=4", "--flush", &at("from"), &tls(&good)]);
        works("cmp", &[&at("from"), &at("disk")]);
        works("nbdcopy", &["--connections=4", &tls(&good), &at("to")]);
        works("cmp", &[&at("from"), &at("to")]);
        // QEMU.
        let object = format!("tls-creds-x509,id=tls,dir={},endpoint=client", good.display());
        let image = format!(
            "driver=raw,file.driver=nbd,file.host=localhost,file.port={strict},file.export=disk,file.tls-creds=tls"
        );
        let file = format!("driver=raw,file.driver=file,file.filename={}", at("from"));
        let compare = ["compare", "--object", &object, "--image-opts", &file, &image];
        assert!(works("qemu-img", &compare).contains("identical"));
        daemon.stop();
    }

    // What is missing or does not fit is said.
    let (cache, socket) = (at("cache"), format!("unix:{}", at("socket")));
    let volume = format!("disk=file:{}", at("disk"));
    let serve = |more: &[&str]| {
        let first = ["serve", "--cache", &cache, "--volume", &volume, "--listen", &socket];
        larder(&[&first, more].concat())
    };
    let before = std::fs::read(at("cache")).unwrap();
    let other_key = good.join("client-key.pem").display().to_string();
    for (more, code, words) in [
        (&["--tls-certificate", &certificate][..], 2, &["server-cert.pem", "needs tls-key"][..]),
        (&["--tls-client-ca", &ca], 2, &["ca-cert.pem", "needs tls-certificate and tls-key"]),
        (&["--listen", "tcp:127.0.0.1:0,tls=require"], 2, &["tls=require", "--tls-certificate"]),
        (&["--tls-certificate", &certificate, "--tls-key", "/nowhere"], 2, &["'/nowhere'"]),
        (&["--tls-certificate", &certificate, "--tls-key", &other_key], 2, &["does not fit"]),
    ] {
        let (got, message) = serve(&[more, &["--state-dir", &at("state")]].concat());
        let last = message.trim().lines().last().unwrap_or_default();
        assert_eq!(got, Some(code), "{message}");
        for word in words {
            assert!(last.contains(word), "'{word}' is not in: {message}");
        }
    }
    assert!(std::fs::read(at("cache")).unwrap() == before, "the cache was not touched");
}
