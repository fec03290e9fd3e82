//! Numbers and structures of the ublk driver's interface (`linux/ublk_cmd.h`; "ublk: Userspace block driver" in the kernel's
//! documentation), as bytes. All are in the machine's own order.

/// Bytes of a sector, the unit of offsets and lengths.
pub const SECTOR: u64 = 512;
/// Tags of a queue, at most.
pub const MAX_DEPTH: u16 = 4096;
/// Queues of a device, at most.
pub const MAX_QUEUES: u16 = 4096;
/// The driver's largest number of a device, plus one.
pub const MAX_DEVICES: u32 = 1 << 20;
/// Bytes of one request's data, at most.
pub const MAX_TRANSFER: u32 = 32 << 20;

/// Commands to `/dev/ublk-control`.
pub mod control {
    /// The state of a device: [`super::Info`].
    pub const GET_INFO: u8 = 0x02;
    /// A new device.
    pub const ADD: u8 = 0x04;
    /// It goes.
    pub const DELETE: u8 = 0x05;
    /// Its disk is there. Ends when every queue is served.
    pub const START: u8 = 0x06;
    /// Its disk is not there any more.
    pub const STOP: u8 = 0x07;
    /// [`super::Params`] before it starts.
    pub const SET_PARAMS: u8 = 0x08;
    /// [`super::Params`] as they are.
    pub const GET_PARAMS: u8 = 0x09;
    /// Its server has died, and another is about to serve its queues.
    pub const START_RECOVERY: u8 = 0x10;
    /// It is served again. Ends when every queue is.
    pub const END_RECOVERY: u8 = 0x11;
    /// What the driver can do (Linux 6.5).
    pub const GET_FEATURES: u8 = 0x13;
    /// Its disk has so many sectors from now on (Linux 6.16).
    pub const UPDATE_SIZE: u8 = 0x15;

    /// Those that only ask: their code says so.
    pub(super) fn only_asks(number: u8) -> bool {
        matches!(number, GET_INFO | GET_PARAMS | GET_FEATURES)
    }
}

/// Commands to `/dev/ublkcN`.
pub mod io {
    /// The first request under a tag, please.
    pub const FETCH: u8 = 0x20;
    /// A request has ended, and the next under its tag, please.
    pub const COMMIT_AND_FETCH: u8 = 0x21;
}

/// What devices are to have and drivers can do.
pub mod flag {
    /// The device waits for another server when its own has died.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// The other server is asked again what its predecessor has not answered.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Codes of commands are made as those of ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Data are read from and written to `/dev/ublkcN`.
    pub const USER_COPY: u64 = 1 << 7;
    /// A disk that is there may be given another size.
    pub const UPDATE_SIZE: u64 = 1 << 10;

    /// What those of a device mean, for people.
    pub fn names(flags: u64) -> Vec<&'static str> {
        let all = [
            (USER_RECOVERY, "recovery"),
            (USER_RECOVERY_REISSUE, "reissue"),
            (CMD_IOCTL_ENCODE, "ioctl-encode"),
            (USER_COPY, "user-copy"),
            (UPDATE_SIZE, "update-size"),
        ];
        all.iter().filter(|(bit, _)| flags & bit != 0).map(|(_, name)| *name).collect()
    }
}

/// States of a device.
pub mod state {
    /// Without a disk.
    pub const DEAD: u16 = 0;
    /// With one, and served.
    pub const LIVE: u16 = 1;
    /// With one, whose requests wait for a server.
    pub const QUIESCED: u16 = 2;
}

/// Kinds of requests.
pub mod op {
    /// Read.
    pub const READ: u8 = 0;
    /// Write.
    pub const WRITE: u8 = 1;
    /// Make durable.
    pub const FLUSH: u8 = 2;
    /// Not needed any more.
    pub const DISCARD: u8 = 3;
    /// To read as zeroes.
    pub const WRITE_ZEROES: u8 = 5;
    /// Durable when it is answered.
    pub const FUA: u32 = 1 << 13;
    /// No hole.
    pub const NOUNMAP: u32 = 1 << 15;
}

/// Attributes of a disk.
pub mod attribute {
    /// Nothing may be written.
    pub const READ_ONLY: u32 = 1 << 0;
    /// There is something for a flush to do.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// Writes may ask to be durable.
    pub const FUA: u32 = 1 << 3;
}

/// `struct ublksrv_ctrl_cmd`.
pub const CONTROL_BYTES: usize = 32;
/// `struct ublksrv_io_cmd`.
pub const IO_BYTES: usize = 16;
/// `struct ublksrv_ctrl_dev_info`.
pub const INFO_BYTES: usize = 64;
/// `struct ublksrv_io_desc`.
pub const DESCRIPTOR_BYTES: usize = 24;
/// `struct ublk_params` up to and with its part for discards.
pub const PARAMS_BYTES: usize = 60;
/// What [`control::GET_FEATURES`] gives.
pub const FEATURES_BYTES: usize = 8;
/// No device in particular.
pub const ANY: u32 = u32::MAX;

/// The code of a command to `/dev/ublk-control`. The plain number is what Linux 6.0 to 6.3 know.
pub fn control_code(number: u8, as_ioctl: bool) -> u32 {
    let direction = if control::only_asks(number) { READS } else { READS | WRITES };
    code(number, as_ioctl, direction, CONTROL_BYTES)
}

/// The code of a command to `/dev/ublkcN`.
pub fn io_code(number: u8, as_ioctl: bool) -> u32 {
    code(number, as_ioctl, READS | WRITES, IO_BYTES)
}

const WRITES: u32 = 1;
const READS: u32 = 2;

fn code(number: u8, as_ioctl: bool, direction: u32, bytes: usize) -> u32 {
    if !as_ioctl {
        return u32::from(number);
    }
    direction << 30 | (bytes as u32) << 16 | u32::from(b'u') << 8 | u32::from(number)
}

/// Where the descriptors of a queue lie in `/dev/ublkcN`, and their bytes, where pages have `page` bytes.
pub fn descriptors_at(queue: u16, depth: u16, page: usize) -> (u64, usize) {
    let most = (usize::from(MAX_DEPTH) * DESCRIPTOR_BYTES).next_multiple_of(page);
    let bytes = (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(page);
    (u64::from(queue) * most as u64, bytes)
}

/// Where a request's data lie in `/dev/ublkcN`.
pub fn data_at(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// Writes fields one after the other.
struct Put<'a>(&'a mut [u8], usize);

impl Put<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }
}

/// The `N` bytes at `at`, which lie within.
fn part<const N: usize>(raw: &[u8], at: usize) -> [u8; N] {
    let mut out = [0u8; N];
    out.copy_from_slice(&raw[at..at + N]);
    out
}

/// `struct ublksrv_ctrl_cmd`: to a device, with memory of `len` bytes at `memory`, or one number.
pub fn control_command(device: u32, memory: u64, len: usize, data: u64) -> [u8; CONTROL_BYTES] {
    let mut out = [0u8; CONTROL_BYTES];
    // It is about no queue.
    Put(&mut out, 0).u32(device).u16(u16::MAX).u16(len as u16).u64(memory).u64(data);
    out
}

/// `struct ublksrv_io_cmd`: `memory` is where data are copied, where they are.
pub fn io_command(queue: u16, tag: u16, result: i32, memory: u64) -> [u8; IO_BYTES] {
    let mut out = [0u8; IO_BYTES];
    Put(&mut out, 0).u16(queue).u16(tag).bytes(&result.to_ne_bytes()).u64(memory);
    out
}

/// `struct ublksrv_ctrl_dev_info`: a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Queues.
    pub queues: u16,
    /// Tags of each.
    pub depth: u16,
    /// One of [`state`].
    pub state: u16,
    /// Bytes of one request's data, at most.
    pub max_transfer: u32,
    /// Its number.
    pub id: u32,
    /// The process that serves it.
    pub pid: i32,
    /// Of [`flag`].
    pub flags: u64,
    /// The server's own note, which the driver keeps.
    pub note: u64,
}

impl Info {
    /// As the driver wants it.
    pub fn encode(&self) -> [u8; INFO_BYTES] {
        let mut out = [0u8; INFO_BYTES];
        let mut put = Put(&mut out, 0);
        put.u16(self.queues).u16(self.depth).u16(self.state).u16(0);
        put.u32(self.max_transfer).u32(self.id).bytes(&self.pid.to_ne_bytes()).u32(0);
        put.u64(self.flags).u64(self.note);
        out
    }

    /// As the driver gives it.
    pub fn decode(raw: &[u8; INFO_BYTES]) -> Info {
        Info {
            queues: u16::from_ne_bytes(part(raw, 0)),
            depth: u16::from_ne_bytes(part(raw, 2)),
            state: u16::from_ne_bytes(part(raw, 4)),
            max_transfer: u32::from_ne_bytes(part(raw, 8)),
            id: u32::from_ne_bytes(part(raw, 12)),
            pid: i32::from_ne_bytes(part(raw, 16)),
            flags: u64::from_ne_bytes(part(raw, 24)),
            note: u64::from_ne_bytes(part(raw, 32)),
        }
    }

    /// It can be served: its numbers are within the interface's limits.
    pub fn is_sound(&self) -> bool {
        (1..=MAX_QUEUES).contains(&self.queues)
            && (1..=MAX_DEPTH).contains(&self.depth)
            && (4096..=MAX_TRANSFER).contains(&self.max_transfer)
    }
}

/// `struct ublk_params`, as far as a plain disk has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// Of [`attribute`].
    pub attributes: u32,
    /// Binary logarithms of bytes: the logical and physical block, the best and the least request.
    pub shifts: [u8; 4],
    /// Sectors of one request, at most.
    pub max_sectors: u32,
    /// Sectors of the disk.
    pub sectors: u64,
    /// Bytes that discards are best multiples of.
    pub discard_granularity: u32,
    /// Sectors of one discard; none: there are none.
    pub max_discard: u32,
    /// Sectors of one writing of zeroes.
    pub max_zeroes: u32,
}

impl Params {
    /// As the driver wants them.
    pub fn encode(&self) -> [u8; PARAMS_BYTES] {
        const BASIC: u32 = 1 << 0;
        const DISCARD: u32 = 1 << 1;
        let mut out = [0u8; PARAMS_BYTES];
        let mut put = Put(&mut out, 0);
        put.u32(PARAMS_BYTES as u32).u32(BASIC | DISCARD);
        put.u32(self.attributes).bytes(&self.shifts);
        // No chunks, and no boundary that a request's memory must keep to.
        put.u32(self.max_sectors).u32(0).u64(self.sectors).u64(0);
        put.u32(0).u32(self.discard_granularity).u32(self.max_discard).u32(self.max_zeroes);
        put.u16(1).u16(0);
        out
    }

    /// What is asked for: so many bytes.
    pub fn wanted() -> [u8; PARAMS_BYTES] {
        let mut out = [0u8; PARAMS_BYTES];
        Put(&mut out, 0).u32(PARAMS_BYTES as u32);
        out
    }

    /// As the driver gives them.
    pub fn decode(raw: &[u8; PARAMS_BYTES]) -> Params {
        Params {
            attributes: u32::from_ne_bytes(part(raw, 8)),
            shifts: part(raw, 12),
            max_sectors: u32::from_ne_bytes(part(raw, 16)),
            sectors: u64::from_ne_bytes(part(raw, 24)),
            discard_granularity: u32::from_ne_bytes(part(raw, 44)),
            max_discard: u32::from_ne_bytes(part(raw, 48)),
            max_zeroes: u32::from_ne_bytes(part(raw, 52)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that a C compiler gives for the kernel's header on a 64-bit machine.
    #[test]
    fn codes() {
        assert_eq!(control_code(control::ADD, true), 0xc020_7504);
        assert_eq!(control_code(control::GET_INFO, true), 0x8020_7502);
        assert_eq!(control_code(control::GET_FEATURES, true), 0x8020_7513);
        assert_eq!(control_code(control::END_RECOVERY, true), 0xc020_7511);
        assert_eq!(io_code(io::FETCH, true), 0xc010_7520);
        assert_eq!(io_code(io::COMMIT_AND_FETCH, true), 0xc010_7521);
        assert_eq!(control_code(control::START, false), 6);
        assert_eq!(control_code(control::UPDATE_SIZE, true), 0xc020_7515);
        assert_eq!(io_code(io::FETCH, false), 0x20);
    }

    #[test]
    fn places() {
        assert_eq!(descriptors_at(0, 128, 4096), (0, 4096));
        assert_eq!(descriptors_at(3, 4096, 4096), (3 * 98304, 98304));
        assert_eq!(descriptors_at(1, 64, 65536), (131_072, 65536));
        assert_eq!(data_at(0, 0), 0x8000_0000);
        assert_eq!(data_at(2, 5), 0x8000_0000 + (2 << 41) + (5 << 25));
    }

    /// Where each field lies, found out by giving one of them a value.
    #[test]
    fn fields_lie_where_the_header_has_them() {
        fn at<const N: usize>(raw: [u8; N], bytes: usize) -> usize {
            let first = raw.iter().position(|&b| b == 0xff).unwrap();
            assert!(raw[first..first + bytes].iter().all(|&b| b == 0xff));
            assert_eq!(raw.iter().filter(|&&b| b == 0xff).count(), bytes);
            first
        }
        let none = Info::default();
        assert_eq!(at(Info { queues: !0, ..none }.encode(), 2), 0);
        assert_eq!(at(Info { depth: !0, ..none }.encode(), 2), 2);
        assert_eq!(at(Info { state: !0, ..none }.encode(), 2), 4);
        assert_eq!(at(Info { max_transfer: !0, ..none }.encode(), 4), 8);
        assert_eq!(at(Info { id: !0, ..none }.encode(), 4), 12);
        assert_eq!(at(Info { pid: !0, ..none }.encode(), 4), 16);
        assert_eq!(at(Info { flags: !0, ..none }.encode(), 8), 24);
        assert_eq!(at(Info { note: !0, ..none }.encode(), 8), 32);
        let none = Params::default();
        assert_eq!(at(Params { attributes: !0, ..none }.encode(), 4), 8);
        assert_eq!(at(Params { shifts: [0, 0, 0, !0], ..none }.encode(), 1), 15);
        assert_eq!(at(Params { max_sectors: !0, ..none }.encode(), 4), 16);
        assert_eq!(at(Params { sectors: !0, ..none }.encode(), 8), 24);
        assert_eq!(at(Params { discard_granularity: !0, ..none }.encode(), 4), 44);
        assert_eq!(at(Params { max_discard: !0, ..none }.encode(), 4), 48);
        assert_eq!(at(Params { max_zeroes: !0, ..none }.encode(), 4), 52);
        let raw = none.encode();
        assert_eq!((raw[0], raw[4], raw[56]), (60, 3, 1), "length, kinds, segments of a discard");
        let command = control_command(7, 0x1122, 64, 9);
        assert_eq!(command[..8], [7, 0, 0, 0, 0xff, 0xff, 64, 0]);
        assert_eq!((command[8], command[9], command[16]), (0x22, 0x11, 9));
        let command = io_command(1, 2, -5, 0x33);
        assert_eq!(command[..9], [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff, 0x33]);
    }

    #[test]
    fn what_is_put_in_comes_out() {
        let info = Info {
            queues: 2,
            depth: 128,
            state: state::QUIESCED,
            max_transfer: 1 << 20,
            id: 3,
            pid: -1,
            flags: flag::USER_COPY,
            note: u64::MAX - 1,
        };
        assert_eq!(Info::decode(&info.encode()), info);
        assert!(info.is_sound());
        for bad in [
            Info { queues: 0, ..info },
            Info { depth: 4097, ..info },
            Info { max_transfer: 512, ..info },
            Info { max_transfer: 64 << 20, ..info },
        ] {
            assert!(!bad.is_sound());
        }
        let params = Params {
            attributes: attribute::VOLATILE_CACHE | attribute::FUA,
            shifts: [9, 12, 16, 12],
            max_sectors: 2048,
            sectors: 1 << 33,
            discard_granularity: 4096,
            max_discard: 1 << 22,
            max_zeroes: 1 << 21,
        };
        assert_eq!(Params::decode(&params.encode()), params);
    }
}
