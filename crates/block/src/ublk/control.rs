//! The driver's control device.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use larder_runtime::{COMMAND_BYTES, CommandRing};
use rustix::io::Errno as Os;

use super::abi::{self, Info, Params, control};

const PATH: &str = "/dev/ublk-control";
/// How long commands may take that wait for nobody.
const SHORT: Duration = Duration::from_secs(10);
/// Between two looks at whether it is worth waiting on.
const SLICE: Duration = Duration::from_millis(50);

/// What to do on a machine without ublk.
const INSTEAD: &str = "or let nbd-client, or nbdfuse and losetup, connect to --listen unix:PATH";

/// The control device, open.
pub(super) struct Control {
    file: File,
    ring: CommandRing,
    /// Codes are made as those of ioctls.
    pub as_ioctl: bool,
    /// What the driver can do; nothing where it cannot be asked (before Linux 6.5).
    pub features: u64,
    next: u64,
}

impl Control {
    /// Opens it. `plain`: nothing is asked of it that Linux 6.0 has not.
    ///
    /// # Errors
    /// In words, with what to do.
    pub(super) fn open(plain: bool) -> Result<Control, String> {
        let file = File::options().read(true).write(true).open(PATH).map_err(|e| {
            let is = |os: Os| e.raw_os_error() == Some(os.raw_os_error());
            if e.kind() == ErrorKind::NotFound || is(Os::NODEV) || is(Os::NXIO) {
                format!(
                    "this kernel has no ublk ({PATH}: {e}): `modprobe ublk_drv` loads it where the kernel was built with \
                     CONFIG_BLK_DEV_UBLK (Linux 6.0 or later); {INSTEAD}"
                )
            } else if e.kind() == ErrorKind::PermissionDenied {
                format!("no permission for {PATH}: ublk is for root; {INSTEAD}")
            } else {
                format!("{PATH}: {e}")
            }
        })?;
        let ring = CommandRing::open(8)
            .map_err(|e| format!("ublk needs io_uring, which cannot be had: {e}; {INSTEAD}"))?;
        let mut control = Control { file, ring, as_ioctl: true, features: 0, next: 0 };
        if plain {
            control.as_ioctl = false;
            return Ok(control);
        }
        let mut features = [0u8; abi::FEATURES_BYTES];
        match control.exchange(control::GET_FEATURES, abi::ANY, &mut features) {
            Ok(()) => control.features = u64::from_ne_bytes(features),
            Err(e) if e.raw_os_error() == Some(Os::PERM.raw_os_error()) => {
                return Err(format!("no permission: ublk needs CAP_SYS_ADMIN; {INSTEAD}"));
            }
            // Linux before 6.5: what it can do is seen by what it leaves of a device's flags.
            Err(_) => control.as_ioctl = false,
        }
        Ok(control)
    }

    /// The driver's state of a device; `None`: there is no such device.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn info(&mut self, device: u32) -> io::Result<Option<Info>> {
        let mut raw = [0u8; abi::INFO_BYTES];
        match self.exchange(control::GET_INFO, device, &mut raw) {
            Ok(()) => Ok(Some(Info::decode(&raw))),
            Err(e) if e.raw_os_error() == Some(Os::NODEV.raw_os_error()) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Adds a device; returns it as the driver wants it.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn add(&mut self, info: &Info) -> io::Result<Info> {
        let mut raw = info.encode();
        self.exchange(control::ADD, info.id, &mut raw)?;
        Ok(Info::decode(&raw))
    }

    /// What the disk is to be.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn set_params(&mut self, device: u32, params: &Params) -> io::Result<()> {
        self.exchange(control::SET_PARAMS, device, &mut params.encode())
    }

    /// What the disk is.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn params(&mut self, device: u32) -> io::Result<Params> {
        let mut raw = Params::wanted();
        self.exchange(control::GET_PARAMS, device, &mut raw)?;
        Ok(Params::decode(&raw))
    }

    /// A command that takes a number, and may take its time: as long as `go_on` says so.
    ///
    /// # Errors
    /// The driver's; [`ErrorKind::TimedOut`] where it was given up. What it does goes on.
    pub(super) fn tell(
        &mut self,
        number: u8,
        device: u32,
        data: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        self.run(number, abi::control_command(device, 0, 0, data), go_on)
    }

    /// A command that takes or gives bytes.
    fn exchange(&mut self, number: u8, device: u32, bytes: &mut [u8]) -> io::Result<()> {
        // On the heap, so that it can be left to the kernel if that does not come back.
        let mut memory = bytes.to_vec();
        let at = memory.as_mut_ptr().expose_provenance() as u64;
        let end = Instant::now() + SHORT;
        let command = abi::control_command(device, at, memory.len(), 0);
        let done = self.run(number, command, &mut || Instant::now() < end);
        if done.as_ref().is_err_and(|e| e.kind() == ErrorKind::TimedOut) {
            // The command is still under way: its memory must never be used for anything else.
            std::mem::forget(memory);
            return done;
        }
        done?;
        bytes.copy_from_slice(&memory);
        Ok(())
    }

    fn run(
        &mut self,
        number: u8,
        command: [u8; abi::CONTROL_BYTES],
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let mut body = [0u8; COMMAND_BYTES];
        body[..abi::CONTROL_BYTES].copy_from_slice(&command);
        let code = abi::control_code(number, self.as_ioctl);
        let token = self.next;
        self.next += 1;
        // SAFETY: the only memory that a command names is `exchange`'s, which it keeps until the command has ended, and leaks
        // where it does not wait for that. The file is open as long as `self`.
        unsafe { self.ring.push(self.file.as_fd(), code, &body, token)? };
        loop {
            match self.ring.wait(SLICE)? {
                Some((ended, result)) if ended == token => {
                    return match result {
                        0.. => Ok(()),
                        _ => Err(io::Error::from_raw_os_error(-result)),
                    };
                }
                // One that was given up earlier.
                Some(_) => {}
                None if go_on() => {}
                None => {
                    return Err(io::Error::new(ErrorKind::TimedOut, "the driver does not answer"));
                }
            }
        }
    }
}
