//! Who may write: a lease object that its holder renews, by conditional writes alone.
//!
//! No clock is compared with another's. Who wants a lease that somebody else has watches it: if it is renewed, its holder
//! lives and the wish is refused; if it is not for as long as it lasts, its holder is gone or will not write any more, since a
//! holder counts the same time from the moment *before* it asked for the renewal, and stops writing when it is over. On
//! the same running system a dead holder is recognised at once.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use object_store::path::Path;
use tokio::time::Instant;

use super::chunks::below;
use super::manifest::{LEASE, Lease};
use super::requests::{Requests, Trouble};

/// How often a lease that somebody has is looked at.
const LOOK: Duration = Duration::from_millis(400);
/// A lease of another program version may say what it likes: it is believed within these bounds.
const BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// What an attachment has.
#[derive(Debug)]
pub(super) struct Holding {
    /// `None`: it only reads.
    generation: Option<u64>,
    lease: RefCell<Option<Held>>,
    until: Cell<Option<Instant>>,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    tag: Option<String>,
}

/// A lease that was taken.
#[derive(Debug)]
pub(super) struct Taken {
    held: Held,
    until: Instant,
}

impl Holding {
    pub(super) fn new(generation: Option<u64>, taken: Option<Taken>) -> Holding {
        let until = Cell::new(taken.as_ref().map(|t| t.until));
        Holding { generation, lease: RefCell::new(taken.map(|t| t.held)), until }
    }

    /// The generation under which this attachment writes.
    pub(super) fn generation(&self) -> Option<u64> {
        self.generation
    }

    /// How long it may be sure of that.
    pub(super) fn left(&self) -> Duration {
        match self.until.get() {
            None => Duration::MAX,
            Some(until) => until.saturating_duration_since(Instant::now()),
        }
    }

    /// When the lease is to be renewed; `None` without one.
    pub(super) fn pause(&self) -> Option<Duration> {
        let lease = self.lease.borrow();
        let ttl = Duration::from_millis(lease.as_ref()?.lease.ttl_ms);
        // Late already: at once, but not in a tight loop.
        Some(if self.left() < ttl / 2 { ttl / 20 } else { ttl / 3 })
    }

    /// Renews the lease, or lets it go. `Changed`: somebody else has it.
    pub(super) async fn renew(
        &self,
        requests: &Requests,
        prefix: &Path,
        free: bool,
    ) -> Result<(), Trouble> {
        let (lease, tag) = {
            let held = self.lease.borrow();
            let Some(held) = held.as_ref() else { return Ok(()) };
            let sequence = held.lease.sequence + 1;
            (Lease { sequence, free, ..held.lease.clone() }, held.tag.clone())
        };
        let asked = Instant::now();
        let at = below(prefix, LEASE);
        let tag = requests.put_record(&at, lease.encode(), tag.as_deref()).await?;
        self.until.set(Some(asked + Duration::from_millis(lease.ttl_ms)));
        *self.lease.borrow_mut() = (!free).then_some(Held { lease, tag });
        Ok(())
    }
}

/// Takes the lease.
pub(super) async fn take(requests: &Requests, prefix: &Path, mine: Lease) -> Result<Taken, String> {
    let at = below(prefix, LEASE);
    let mut seen: Option<(Option<String>, Instant)> = None;
    loop {
        let (found, tag) =
            match requests.record(&at).await {
                Ok((bytes, tag)) => (
                    Some(Lease::decode(&bytes).map_err(|e| {
                        format!("{e}; remove it if no other daemon uses the volume")
                    })?),
                    tag,
                ),
                Err(Trouble::Missing) => (None, None),
                Err(e) => return Err(e.to_string()),
            };
        let free = match &found {
            None => true,
            Some(lease) if lease.free => true,
            Some(lease) if is_gone(lease) => {
                tracing::info!(
                    "backing store '{}': its last writer, {}, has ended without letting it go",
                    requests.uri(),
                    lease.holder
                );
                true
            }
            Some(lease) => {
                let (first, since) = seen.get_or_insert_with(|| {
                    tracing::info!(
                        "backing store '{}': {} has it; waiting whether it still does",
                        requests.uri(),
                        lease.holder
                    );
                    (tag.clone(), Instant::now())
                });
                if *first != tag {
                    return Err(format!(
                        "{} has it for writing: stop that daemon first, or attach it read-only there",
                        lease.holder
                    ));
                }
                let ttl = Duration::from_millis(lease.ttl_ms).clamp(BOUNDS.0, BOUNDS.1);
                let over = since.elapsed() > ttl;
                if over {
                    tracing::warn!(
                        "backing store '{}': {} has not been heard of for {} s, its lease is over",
                        requests.uri(),
                        lease.holder,
                        ttl.as_secs()
                    );
                }
                over
            }
        };
        if !free {
            tokio::time::sleep(LOOK).await;
            continue;
        }
        let asked = Instant::now();
        let lease = mine.clone();
        match requests.put_record(&at, lease.encode(), tag.as_deref()).await {
            Ok(tag) => {
                let until = asked + Duration::from_millis(lease.ttl_ms);
                return Ok(Taken { held: Held { lease, tag }, until });
            }
            // Somebody else was faster: it is looked at again.
            Err(Trouble::Changed | Trouble::Missing) => seen = None,
            Err(e) => return Err(e.to_string()),
        }
    }
}

/// This process's lease, to be taken.
pub(super) fn mine(nonce: u64, ttl: Duration) -> Lease {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let process = std::process::id();
    Lease {
        holder: format!("process {process} on {host}"),
        nonce,
        sequence: 0,
        ttl_ms: ttl.as_millis() as u64,
        free: false,
        system: system(),
        process,
        started: started(process).unwrap_or(0),
    }
}

/// The running system and its space of process numbers; empty where that cannot be told.
fn system() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    match (boot.trim(), std::fs::read_link("/proc/self/ns/pid")) {
        ("", _) | (_, Err(_)) => String::new(),
        (boot, Ok(space)) => format!("{boot} {}", space.display()),
    }
}

/// When a process was started; `None` if there is none of that number.
fn started(process: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name may hold anything, but for the last ')'.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // A process that has ended and was not yet waited for is no more.
    (fields.first()? != &"Z").then_some(())?;
    fields.get(19)?.parse().ok()
}

/// Its process is certainly no more.
fn is_gone(lease: &Lease) -> bool {
    let here = system();
    !here.is_empty()
        && lease.system == here
        && lease.started != 0
        && started(lease.process) != Some(lease.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_gone() {
        let lease = mine(1, Duration::from_secs(15));
        assert!(!is_gone(&lease));
        assert!(
            is_gone(&Lease { started: lease.started + 1, ..lease.clone() }),
            "its number was used again"
        );
        assert!(!is_gone(&Lease { system: "other".into(), process: 1 << 30, ..lease.clone() }));
        assert!(is_gone(&Lease { process: 1 << 30, ..lease }));
    }
}
