//! What defaults are made from, and the process-wide things that a server sets up before its threads start.

use std::ffi::OsString;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};

use larder_kv::config::{LISTEN_VARIABLE, ListenAddress, Machine};
use larder_runtime::machine;
use tracing::info;

use crate::error::CliError;

/// Set by Kubernetes in every container of a pod.
const POD: &str = "KUBERNETES_SERVICE_HOST";

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Where the environment says to listen. A pod has a network of its own, and an address that only its services and its policies make
/// known: whoever runs a cache in one means others to reach it.
fn listen() -> Option<Vec<String>> {
    match variable(LISTEN_VARIABLE) {
        Some(said) => Some(vec![said.to_string_lossy().into_owned()]),
        None => variable(POD).map(|_| vec!["0.0.0.0".into(), "::".into()]),
    }
}

/// Says who can reach the server. `by_default`: no flag and no file says where to listen.
pub(crate) fn say_who_reaches(listen: &[ListenAddress], by_default: bool) {
    let is_local = |l: &ListenAddress| ["127.0.0.1", "::1", "localhost"].contains(&l.host.as_str());
    let local = listen.iter().all(is_local);
    if local && !listen.is_empty() {
        info!(
            "reachable from this machine alone; -l 0.0.0.0, or {LISTEN_VARIABLE}=0.0.0.0 in the environment, opens it to the \
             network"
        );
    }
    if !local && by_default && variable(LISTEN_VARIABLE).is_none() {
        info!(
            "listening on all addresses, as memcached does, since this is a pod of Kubernetes ({POD} is set); -l 127.0.0.1, \
             or {LISTEN_VARIABLE}=127.0.0.1 in the environment, keeps it to the pod"
        );
    }
}

/// Reads the machine's facts. State goes to `flash_folder` if there is one: it is where this process may write, and often the
/// only place.
pub(crate) fn facts(flash_folder: Option<PathBuf>) -> Machine {
    // systemd's StateDirectory= comes before the usual place.
    let given = flash_folder.or_else(|| variable("STATE_DIRECTORY").map(PathBuf::from));
    Machine {
        state_dir_is_named: given.is_some(),
        listen: listen(),
        // Where /proc does not say, a small machine is assumed.
        memory: machine::usable_memory().unwrap_or(1 << 30),
        cpus: machine::processors(),
        state_dir: given.unwrap_or_else(machine::default_data_dir),
        free_space: |dir| machine::free_space(dir).ok(),
        can_hold_files: machine::can_hold_files,
    }
}

/// Makes sure that `connections` descriptors can be opened.
pub(crate) fn raise_descriptor_limit(connections: u32) -> Result<(), CliError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // Listeners, polls, wakers, rings, flash, log, and the live page's connections.
    let need = u64::from(connections) + 256;
    let now = getrlimit(Resource::Nofile);
    if now.current.is_none_or(|c| c >= need) {
        return Ok(());
    }
    let maximum = match now.maximum {
        Some(m) if m < need => Some(need),
        other => other,
    };
    setrlimit(Resource::Nofile, Rlimit { current: Some(need), maximum }).map_err(|e| {
        CliError::Usage(format!(
            "conn-limit '{connections}': needs {need} open files, but the limit is {} ({e}): lower -c, or raise ulimit -n",
            now.maximum.map_or_else(|| "unknown".to_owned(), |m| m.to_string())
        ))
    })
}

/// `-r`.
pub(crate) fn enable_core_dumps() -> Result<(), CliError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Core);
    let unlimited = Rlimit { current: None, maximum: None };
    setrlimit(Resource::Core, unlimited)
        .or_else(|_| {
            setrlimit(Resource::Core, Rlimit { current: now.maximum, maximum: now.maximum })
        })
        .map_err(|e| CliError::Runtime(format!("enable-coredumps: {e}: raise ulimit -c")))
}

/// `-k`.
pub(crate) fn lock_memory() -> Result<(), CliError> {
    use rustix::mm::{MlockAllFlags, mlockall};
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE).map_err(|e| {
        CliError::Runtime(format!(
            "lock-memory: {e}: raise ulimit -l, or run with CAP_IPC_LOCK, or leave out -k"
        ))
    })
}

/// Makes a data directory that is not there: for another user, if one is given with the numbers of user and group.
pub(crate) fn make_data_dir(dir: &Path, owner: Option<(&str, u32, u32)>) -> Result<(), CliError> {
    let made = match dir.parent() {
        Some(parent) => std::fs::create_dir_all(parent),
        None => Ok(()),
    };
    made.and_then(|()| std::fs::DirBuilder::new().mode(0o700).create(dir))
        .and_then(|()| match owner {
            Some((_, uid, gid)) => chown(dir, Some(uid), Some(gid)),
            None => Ok(()),
        })
        .map_err(|e| {
            let of = owner.map_or_else(String::new, |(name, ..)| format!(" for user '{name}'"));
            CliError::Runtime(format!(
                "data directory '{}': cannot be made{of}: {e}: name another with --data-dir",
                dir.display()
            ))
        })
}

/// The numbers of user and group that `/etc/passwd` has of a user, by name or number.
fn user_in(table: &str, name: &str) -> Option<(u32, u32)> {
    table.lines().find_map(|line| {
        let mut f = line.split(':');
        let (entry, _, uid, gid) = (f.next()?, f.next()?, f.next()?, f.next()?);
        (entry == name || uid == name).then_some((uid.parse().ok()?, gid.parse().ok()?))
    })
}

/// `-u`: only root can become someone else. Must run before any thread starts, since each thread has its own identity. A data
/// directory that is not there is made first and given to the user, who could not make it where only root may.
pub(crate) fn become_user(name: &str, data_dir: Option<&Path>) -> Result<(), CliError> {
    use rustix::process::{Gid, Uid};
    use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let bad = |reason: String| CliError::Usage(format!("user '{name}': {reason}"));
    let table = std::fs::read_to_string("/etc/passwd");
    let (uid, gid) = match (user_in(table.as_deref().unwrap_or_default(), name), name.parse()) {
        (Some(found), _) => found,
        // Images have users that are only numbers.
        (None, Ok(number)) => (number, number),
        (None, Err(_)) => {
            return Err(bad(match table {
                Err(e) => format!("/etc/passwd: {e}: give the user's number"),
                Ok(_) => {
                    "is not in /etc/passwd: give the name or the number of a user of this machine"
                        .into()
                }
            }));
        }
    };
    if uid == 0 {
        return Ok(());
    }
    if let Some(dir) = data_dir.filter(|dir| !dir.exists()) {
        make_data_dir(dir, Some((name, uid, gid)))?;
    }
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&[gid])
        .and_then(|()| set_thread_gid(gid))
        .and_then(|()| set_thread_uid(uid))
        .map_err(|e| CliError::Runtime(format!("user '{name}': cannot become this user: {e}")))
}
