//! By what a store is known again, and what proves that it is as it was left.
//!
//! The cache keeps 64 bytes for each volume: written when it is attached, and again when it is let go in good order.
//! [`Identity::proves`] compares them with what is found the next time. It errs on one side: what is not proved is said not
//! to be, and the lines of that volume go.
//!
//! | store | let go in good order | killed, or a power cut |
//! | --- | --- | --- |
//! | file | device, inode, size, time of change and the writer's mark are the same, and the last change was made by the one who let go or before it came | its last change is the last write of the run that was cut short, no older and no newer one, as far as its notes go (`change_markers`), and the mark is that run's; or that run is known to have written nothing, and all is as it was when it came |
//! | object store | no other writer's generation, and every chunk has the ETag that it had | no other writer's generation |
//! | block device, NBD | never | never |
//!
//! A time of change that may stand for a whole second (`watch`) proves nothing, either way.
//!
//! `--trust-unchanged` stands in for the proof where there is none to be had at all: block devices and NBD.

use larder_base::{HashKey, KeyHasher};

use super::watch::is_coarse;

const UNLOOKED: &str = "its store is of another kind, or could not be looked at when it was let go";
const COARSE: &str =
    "its file system keeps whole seconds, which do not show whether it was changed";
const CUT_SHORT: &str = "nothing shows that the run that was cut short was the last to change its file, and that what it wrote last is there";
const BLIND: &str = "its store cannot tell whether it changed (--trust-unchanged vouches for it)";

/// Bytes of an identity on the cache device.
pub const IDENTITY_BYTES: usize = 64;

/// The time of a change that an attachment found while it had the file and did not make itself: no file has it, so nothing
/// that is cached of it will be proved.
pub const FOREIGN: i128 = i64::MIN as i128;

/// Of a file: behind the time of change, which had 16 bytes without it, is the writer's mark.
const WITH_MARK: u8 = 1;

/// By what a store is known again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A regular file: another file has another inode, and a changed one another time of change.
    File {
        /// Number of the file system's device.
        device: u64,
        /// What the file system calls itself (`f_fsid`), the same after a reboot that renumbers devices; 0 if it has none.
        file_system: u64,
        /// Number within it.
        inode: u64,
        /// Bytes.
        size: u64,
        /// When its contents or its attributes last changed, nanoseconds since 1970; [`FOREIGN`] if not by this attachment.
        changed_ns: i128,
        /// The number of this attachment, under which its notes are kept.
        run: u64,
        /// The attachment that is known to have made the last change: notes of a run that was cut short say so.
        last_by: u64,
        /// The one that is known to have changed nothing, as they say.
        idle: u64,
        /// The run that the file itself names as its last writer (an attribute); 0 if it names none.
        mark: u64,
        /// This attachment only reads.
        read_only: bool,
    },
    /// Chunks in an object store.
    Objects {
        /// The volume's own number.
        volume: [u8; 16],
        /// Bytes.
        size: u64,
        /// Of this attachment: no two are the same.
        generation: u64,
        /// The generation of the last attachment that changed anything.
        changed: u64,
        /// Over the ETags of all chunks; 0 where they are not known.
        digest: u64,
    },
    /// A store that cannot tell whether it has changed.
    Blind {
        /// What it is called.
        name: String,
        /// Bytes.
        size: u64,
    },
}

fn word(bytes: &[u8; IDENTITY_BYTES], at: usize) -> u64 {
    let mut word = [0u8; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Identity {
    /// As it is kept. The first byte says what kind it is; zeros are no store's.
    pub fn encode(&self) -> [u8; IDENTITY_BYTES] {
        let mut out = [0u8; IDENTITY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Identity::File {
                device,
                file_system,
                inode,
                size,
                changed_ns,
                run,
                mark,
                read_only,
                ..
            } => {
                put(0, &[1, WITH_MARK, u8::from(*read_only)]);
                put(8, &device.to_le_bytes());
                put(16, &inode.to_le_bytes());
                put(24, &size.to_le_bytes());
                put(32, &(*changed_ns as i64).to_le_bytes());
                put(40, &mark.to_le_bytes());
                put(48, &run.to_le_bytes());
                put(56, &file_system.to_le_bytes());
            }
            Identity::Blind { name, size } => {
                put(0, &[2]);
                put(24, &size.to_le_bytes());
                let name = KeyHasher::new(HashKey([0; 16])).hash(name.as_bytes());
                put(32, &name.0.to_le_bytes());
            }
            Identity::Objects { volume, size, generation, changed, digest } => {
                put(0, &[3]);
                put(8, volume);
                put(24, &size.to_le_bytes());
                put(32, &generation.to_le_bytes());
                put(40, &changed.to_le_bytes());
                put(48, &digest.to_le_bytes());
            }
        }
        out
    }

    /// Whether this is the store of which `then` was kept, whatever was written there since, and however large it is now. `remembers`: the file
    /// itself says that it is. Of a store that cannot tell what it is more than its name is not known.
    ///
    /// # Errors
    /// Why it is not, or may not be, for people.
    pub fn is_of(&self, then: &[u8; IDENTITY_BYTES], remembers: bool) -> Result<(), &'static str> {
        let now = self.encode();
        match self {
            // It could not be looked at then.
            _ if then[0] == 0 => Ok(()),
            _ if then[0] != now[0] => Err("it is of another kind"),
            Identity::File { inode, .. } if word(then, 16) != *inode => Err("it is another file"),
            Identity::File { device, file_system, .. } => {
                // Numbers of devices are given anew when the system starts, and some file systems are called by them.
                let known = *file_system != 0 && word(then, 56) != 0;
                let same = word(then, 8) == *device || word(then, 56) == *file_system || !known;
                if same || remembers { Ok(()) } else { Err("it is on another file system") }
            }
            Identity::Objects { volume, .. } if then[8..24] != volume[..] => {
                Err("it holds another volume")
            }
            Identity::Objects { .. } => Ok(()),
            Identity::Blind { .. } if then[32..40] != now[32..40] => Err("it has another name"),
            Identity::Blind { .. } => Ok(()),
        }
    }

    /// Whether the store, found so, holds what it held when `then` was kept: `let_go` in good order, or when it was attached
    /// by a run that was cut short. `trust` vouches for stores that cannot tell.
    ///
    /// # Errors
    /// Why that is not proved, for people.
    pub fn proves(
        &self,
        then: &[u8; IDENTITY_BYTES],
        let_go: bool,
        trust: bool,
    ) -> Result<(), &'static str> {
        let now = self.encode();
        if then[0] != now[0] {
            return Err(UNLOOKED);
        }
        if then[24..32] != now[24..32] {
            return Err("its store has another size");
        }
        match self {
            Identity::File {
                device, file_system, inode, changed_ns, last_by, idle, mark, ..
            } => {
                let same_place = word(then, 8) == *device
                    || (*file_system != 0 && word(then, 56) == *file_system);
                if !same_place || word(then, 16) != *inode {
                    return Err("its file is another one");
                }
                let (version, only_read, run) = (then[1], then[2] != 0, word(then, 48));
                if *changed_ns == FOREIGN {
                    return Err("its file is changed by something else");
                }
                if is_coarse(*changed_ns) {
                    return Err(COARSE);
                }
                let unchanged = match version {
                    0 => then[32..48] == changed_ns.to_le_bytes(),
                    _ => i128::from(word(then, 32) as i64) == *changed_ns,
                };
                let unmarked = version == 0 || word(then, 40) == *mark;
                match let_go {
                    true if !unchanged => Err("its file was changed"),
                    true if !unmarked => Err("another Larder has written to its file"),
                    true => Ok(()),
                    false if run != 0 && run == *last_by => Ok(()),
                    // The same time alone is no proof: the run may have written, and the file have been put back.
                    false if unchanged && unmarked && run != 0 && (only_read || run == *idle) => {
                        Ok(())
                    }
                    false => Err(CUT_SHORT),
                }
            }
            Identity::Objects { volume, changed, digest, .. } => {
                if then[8..24] != volume[..] {
                    return Err("its store holds another volume");
                }
                let ours = !let_go && word(then, 32) == *changed;
                if !ours && word(then, 40) != *changed {
                    return Err("another writer had it meanwhile");
                }
                if !ours && word(then, 48) != *digest {
                    return Err("its chunks were changed by something that is not Larder");
                }
                Ok(())
            }
            Identity::Blind { .. } if then != &now => Err("its store has another name"),
            Identity::Blind { .. } if trust => Ok(()),
            Identity::Blind { .. } => Err(BLIND),
        }
    }
}

/// Whether a reason of [`Identity::proves`] is that the store is another one, or was changed; else nothing shows that it was not.
pub fn is_change(why: &str) -> bool {
    ![UNLOOKED, COARSE, CUT_SHORT, BLIND].contains(&why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(changed_ns: i128, run: u64, last_by: u64) -> Identity {
        Identity::File {
            device: 1,
            file_system: 9,
            inode: 2,
            size: 3,
            changed_ns,
            run,
            last_by,
            idle: 0,
            mark: 4,
            read_only: false,
        }
    }

    macro_rules! with {
        ($file:expr, $field:ident = $value:expr) => {{
            let mut identity = $file;
            if let Identity::File { $field, .. } = &mut identity {
                *$field = $value;
            }
            identity
        }};
    }

    #[test]
    fn files() {
        let then = file(50, 7, 0).encode();
        let idle = |identity| with!(identity, idle = 7);
        for let_go in [true, false] {
            assert!(idle(file(50, 8, 0)).proves(&then, let_go, false).is_ok(), "untouched");
            assert!(
                idle(file(51, 8, 0)).proves(&then, let_go, true).is_err(),
                "touched by nobody knows whom"
            );
            let other = with!(idle(file(50, 8, 0)), device = 5);
            assert!(other.proves(&then, let_go, false).is_ok(), "the device has another number");
            let other = with!(idle(file(50, 8, 7)), inode = 4);
            assert!(other.proves(&then, let_go, false).is_err(), "another inode");
            let other = with!(idle(file(50, 8, 0)), mark = 5);
            assert!(other.proves(&then, let_go, false).is_err(), "the same time, another writer");
        }
        assert!(file(51, 8, 7).proves(&then, false, false).is_ok(), "we did it");
        assert!(file(51, 8, 7).proves(&then, true, false).is_err(), "it was let go");
        assert!(file(51, 8, 6).proves(&then, false, false).is_err(), "another run did it");
        let nameless = file(50, 0, 0).encode();
        assert!(file(51, 8, 0).proves(&nameless, false, false).is_err());
    }

    /// The run was killed after it wrote, and the file put back to what it was when the run came.
    #[test]
    fn an_equal_time_is_no_proof_after_a_kill() {
        let then = file(50, 7, 0).encode();
        assert!(file(50, 8, 0).proves(&then, false, false).is_err(), "it may have written");
        assert!(file(50, 8, 0).proves(&then, true, false).is_ok(), "it was let go");
        let reader = with!(file(50, 7, 0), read_only = true).encode();
        assert!(file(50, 8, 0).proves(&reader, false, false).is_ok(), "it could not");
    }

    #[test]
    fn whole_seconds_prove_nothing() {
        let at = 1_700_000_000 * 1_000_000_000;
        let then = file(at, 7, 0).encode();
        for let_go in [true, false] {
            let found = with!(file(at, 8, 7), idle = 7);
            assert!(found.proves(&then, let_go, true).unwrap_err().contains("whole seconds"));
        }
    }

    /// As they were before they had a mark: of a volume that was let go in good order they still hold.
    #[test]
    fn older_identities() {
        let mut then = file(50, 7, 0).encode();
        then[1] = 0;
        then[32..48].copy_from_slice(&50i128.to_le_bytes());
        assert!(file(50, 8, 0).proves(&then, true, false).is_ok());
        assert!(file(51, 8, 0).proves(&then, true, false).is_err());
        assert!(file(50, 8, 0).proves(&then, false, false).is_err());
        then[32..48].copy_from_slice(&i128::MIN.to_le_bytes());
        assert!(file(FOREIGN, 8, 0).proves(&then, true, false).is_err());
        let foreign = file(FOREIGN, 7, 0).encode();
        assert!(file(50, 8, 0).proves(&foreign, true, false).is_err());
        assert!(file(FOREIGN, 8, 0).proves(&foreign, true, false).is_err());
    }

    fn objects(generation: u64, changed: u64, digest: u64) -> Identity {
        Identity::Objects { volume: [4; 16], size: 3, generation, changed, digest }
    }

    #[test]
    fn object_stores() {
        // Attached as generation 10, when 8 had made the last change.
        let attached = objects(10, 8, 111).encode();
        assert!(objects(11, 8, 111).proves(&attached, false, false).is_ok(), "nobody wrote");
        assert!(objects(11, 10, 222).proves(&attached, false, false).is_ok(), "we wrote");
        assert!(
            objects(12, 11, 222).proves(&attached, false, false).is_err(),
            "somebody else wrote"
        );
        assert!(objects(11, 8, 222).proves(&attached, false, false).is_err(), "not by Larder");
        let let_go = objects(10, 10, 333).encode();
        assert!(objects(14, 10, 333).proves(&let_go, true, false).is_ok());
        assert!(objects(14, 10, 334).proves(&let_go, true, true).is_err());
        assert!(objects(14, 12, 333).proves(&let_go, true, true).is_err());
    }

    #[test]
    fn a_store_is_known_again_by_what_stays_when_it_is_written_or_grows() {
        let then = file(50, 7, 0).encode();
        assert!(file(51, 9, 3).is_of(&then, false).is_ok(), "it was written");
        assert!(with!(file(50, 7, 0), size = 9).is_of(&then, false).is_ok(), "it has grown");
        assert!(with!(file(50, 7, 0), inode = 9).is_of(&then, true).is_err(), "another file");
        let renumbered = with!(file(50, 7, 0), device = 9);
        assert!(renumbered.is_of(&then, false).is_ok(), "the same file system");
        let other = with!(renumbered, file_system = 8);
        assert!(other.is_of(&then, false).is_err(), "another, where a file has the same number");
        assert!(other.is_of(&then, true).is_ok(), "it says itself what it is");
        let nameless = with!(other, file_system = 0);
        assert!(nameless.is_of(&then, false).is_ok(), "nothing better is known");
        assert!(file(50, 7, 0).is_of(&[0; 64], false).is_ok(), "nothing was known then");
        let (a, b) = (objects(3, 2, 1), objects(9, 8, 7));
        assert!(b.is_of(&a.encode(), false).is_ok());
        let c =
            Identity::Objects { volume: [5; 16], size: 3, generation: 3, changed: 2, digest: 1 };
        assert!(c.is_of(&a.encode(), false).is_err());
        let blind = |name: &str, size| Identity::Blind { name: name.into(), size };
        assert!(blind("a", 2).is_of(&blind("a", 1).encode(), false).is_ok());
        assert!(blind("b", 1).is_of(&blind("a", 1).encode(), false).is_err());
        assert!(a.is_of(&then, true).is_err());
    }

    #[test]
    fn the_blind() {
        let blind = Identity::Blind { name: "a".into(), size: 1 };
        let then = blind.encode();
        for let_go in [true, false] {
            assert!(blind.proves(&then, let_go, false).is_err());
            assert!(blind.proves(&then, let_go, true).is_ok());
            let other = Identity::Blind { name: "b".into(), size: 1 };
            assert!(other.proves(&then, let_go, true).is_err());
            assert!(file(1, 1, 1).proves(&then, let_go, true).is_err());
            assert!(blind.proves(&[0; 64], let_go, true).is_err());
        }
    }
}
