//! The drives of a store at its start: what each says of itself, which of them are new, and what is written before anything else.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::{ByteSize, HashKey, Now, UnixSecs};
use larder_engine::kv::FlashGeometry;
use larder_engine::kv::node::Plan;
use larder_engine::kv::node::start::drives::{
    self, DrivesDrawn, DrivesError, FoundDrive, Member, flash_of,
};
use larder_engine::kv::node::start::{Heads, Superblocks};
use larder_format::signature::{HEAD_BYTES, TAIL_BYTES};
use larder_format::superblock::{Chosen, choose};
use larder_format::{PAGE_SIZE, Signature, Superblock, SuperblockError, Uuid};
use larder_runtime::{AlignedBuf, Device, FlashDevice};

use super::super::warm::Region;
use super::super::{CacheConfig, CacheError, FlashFile};
use super::{need, random};

/// The flash of a store, open: one drive of it.
pub(in crate::kv) struct Medium {
    /// As messages name it.
    pub(in crate::kv) path: PathBuf,
    /// Bytes that are asked for; `None`: what is there.
    pub(in crate::kv) size: Option<u64>,
    pub(in crate::kv) device: Arc<dyn Device>,
    /// The same device, if it is one that can be asked for its wear.
    pub(in crate::kv) drive: Option<Arc<FlashDevice>>,
    /// Why it goes through the page cache, if it does.
    pub(in crate::kv) why_buffered: Option<String>,
}

/// The head of a flash.
pub(in crate::kv) struct Head<'a>(pub(in crate::kv) &'a dyn Device);

impl Heads for Head<'_> {
    type Error = larder_runtime::DeviceError;

    fn write(&mut self, copy: usize, superblock: &Superblock) -> Result<(), Self::Error> {
        let mut page = AlignedBuf::zeroed(PAGE_SIZE);
        page.copy_from_slice(&superblock.encode()[..]);
        self.0.write_at((copy * PAGE_SIZE) as u64, &page)
    }
    fn sync(&mut self) -> Result<(), Self::Error> {
        self.0.sync()
    }
}

/// A drive that takes part.
pub(in crate::kv) struct Taken {
    /// Its place among the drives.
    pub(in crate::kv) place: usize,
    pub(in crate::kv) medium: Medium,
    /// What is in force on it.
    pub(in crate::kv) superblocks: Superblocks,
    /// What it is to say, but for what this start changes.
    pub(in crate::kv) says: Superblock,
    /// It has just been formatted.
    pub(in crate::kv) fresh: bool,
}

/// All that take part, and what they come to.
pub(in crate::kv) struct AllTaken {
    pub(in crate::kv) drives: Vec<Taken>,
    pub(in crate::kv) flash: FlashGeometry,
    /// What the operator may want to know: one line each.
    pub(in crate::kv) notes: Vec<String>,
    /// What the operator should know: one line each.
    pub(in crate::kv) warnings: Vec<String>,
}

/// What a drive holds, if that is Larder's or nothing.
struct Looked {
    found: Option<Chosen>,
    /// What it held before it is formatted.
    former: Option<Uuid>,
}

/// Reads the superblocks, and formats drives that hold nothing (or whatever they hold, if that was asked for).
pub(in crate::kv) fn take(
    config: &CacheConfig,
    media: Vec<Medium>,
    now: Now,
) -> Result<AllTaken, CacheError> {
    let looked: Vec<Looked> =
        media.iter().map(|medium| look(config, medium)).collect::<Result<_, _>>()?;
    let is_part = |l: &Looked| l.found.as_ref().is_some_and(|c| c.superblock.part.is_some());
    let (members, flash) = match &looked[..] {
        [one] if !is_part(one) => alone(config, &media[0], one, now)?,
        all => {
            if let Some(record) = &config.record {
                return Err(CacheError::RecordSeveral(record.file.clone()));
            }
            several(config, &media, all, now)?
        }
    };
    // What cannot be served is not formatted.
    let (max_item, of) = (u64::from(config.max_item), Some((flash, config.flash_object_size)));
    if members.iter().any(|member| member.fresh) {
        Plan::over(config.memory, max_item, of, need(config))?;
    }
    let mut all = AllTaken { drives: Vec::new(), flash, notes: Vec::new(), warnings: Vec::new() };
    let new = members.iter().filter(|member| member.fresh).count();
    let some = new > 0 && new < members.len();
    for ((medium, looked), member) in media.into_iter().zip(looked).zip(members) {
        let (fresh, known) = (member.fresh, looked.found.is_some());
        let taken = one(medium, looked, member, &mut all.warnings)?;
        if some && fresh && !known {
            let path = taken.medium.path.display();
            all.notes.push(format!("flash '{path}' formatted: it is new to this cache"));
        }
        all.drives.push(taken);
    }
    Ok(all)
}

/// That new drives of these sizes can be one cache, before any of them is touched. Of a file that is made anew the size is what is asked for.
pub(in crate::kv) fn can_be(
    config: &CacheConfig,
    files: &[&FlashFile],
    devices: &[Option<FlashDevice>],
) -> Result<(), CacheError> {
    let sizes = files.iter().zip(devices).map(|(file, device)| {
        let there = device.as_ref().map_or(0, |device| device.geometry().size);
        FoundDrive { superblock: None, bytes: file.size.map_or(there, whole_pages) }
    });
    let sizes: Vec<FoundDrive<'_>> = sizes.collect();
    let drawn = DrivesDrawn {
        uuid: Uuid([0; 16]),
        hash_key: HashKey([0; 16]),
        names: Vec::new(),
        now: UnixSecs(0),
    };
    let max_item = u64::from(config.max_item);
    let members = drives::assemble(&sizes, config.memory, max_item, &drawn);
    let members = members.map_err(|(drive, why)| {
        let path = files.get(drive).or(files.first()).map(|file| file.path.clone());
        CacheError::Drive { path: path.unwrap_or_default(), why: remedy(&why) }
    })?;
    let of = Some((flash_of(&members), config.flash_object_size));
    Plan::over(config.memory, max_item, of, need(config))?;
    Ok(())
}

/// The only drive of a cache that never had another.
fn alone(
    config: &CacheConfig,
    medium: &Medium,
    looked: &Looked,
    now: Now,
) -> Result<(Vec<Member>, FlashGeometry), CacheError> {
    let (superblock, fresh) = match &looked.found {
        Some(chosen) => (chosen.superblock.clone(), false),
        None => {
            let size = medium.device.geometry().size;
            let geometry = Plan::geometry(config.memory, size, u64::from(config.max_item))?;
            let (uuid, secret) = (Uuid(random()?), HashKey(random()?));
            (Superblock::format(uuid, secret, geometry, now.wall), true)
        }
    };
    let flash =
        FlashGeometry { salt: superblock.salt(), ..FlashGeometry::from(&superblock.geometry) };
    Ok((vec![Member { superblock, fresh }], flash))
}

fn several(
    config: &CacheConfig,
    media: &[Medium],
    looked: &[Looked],
    now: Now,
) -> Result<(Vec<Member>, FlashGeometry), CacheError> {
    let mut names = Vec::new();
    for _ in media {
        names.push(u64::from_le_bytes(random()?).max(1));
    }
    let (uuid, hash_key) = (Uuid(random()?), HashKey(random()?));
    let drawn = DrivesDrawn { uuid, hash_key, names, now: now.wall };
    let found: Vec<_> = media
        .iter()
        .zip(looked)
        .map(|(medium, looked)| FoundDrive {
            superblock: looked.found.as_ref().map(|chosen| &chosen.superblock),
            bytes: medium.size.map_or(medium.device.geometry().size, whole_pages),
        })
        .collect();
    let members = drives::assemble(&found, config.memory, u64::from(config.max_item), &drawn)
        .map_err(|(drive, why)| match media.get(drive) {
            Some(medium) => CacheError::Drive { path: medium.path.clone(), why: remedy(&why) },
            None => CacheError::Drive {
                path: media.first().map(|m| m.path.clone()).unwrap_or_default(),
                why: remedy(&why),
            },
        })?;
    let flash = flash_of(&members);
    Ok((members, flash))
}

/// What a device has of so many bytes.
fn whole_pages(bytes: u64) -> u64 {
    bytes / PAGE_SIZE as u64 * PAGE_SIZE as u64
}

/// What is wrong with a drive, and what helps.
fn remedy(why: &DrivesError) -> String {
    let helps = match why {
        DrivesError::OtherCache(..) => {
            "; leave it out, or erase it first (a new file, blkdiscard -z): what it holds is lost then"
        }
        DrivesError::Twice => "; name each drive once, and leave a copy out",
        DrivesError::TooMany(_)
        | DrivesError::Segments(..)
        | DrivesError::NoNumbers(_)
        | DrivesError::Geometry(_) => "",
    };
    format!("{why}{helps}")
}

fn look(config: &CacheConfig, medium: &Medium) -> Result<Looked, CacheError> {
    let (path, device) = (&medium.path, medium.device.as_ref());
    let size = device.geometry().size;
    let mut head = vec![0; (HEAD_BYTES as u64).min(size) as usize];
    device.read_at(0, &mut head)?;
    let page = |i: usize| head.get(i * PAGE_SIZE..(i + 1) * PAGE_SIZE).unwrap_or(&[]);
    let chosen = choose(page(0), page(1));
    if config.format_flash {
        let former = chosen.ok().map(|former| former.superblock.uuid);
        return Ok(Looked { found: None, former });
    }
    match chosen {
        Ok(chosen) => {
            let formatted = chosen.superblock.geometry.device_bytes();
            if let Some(wanted) = medium.size
                && whole_pages(wanted) != whole_pages(formatted)
            {
                return Err(CacheError::OtherSize {
                    path: path.clone(),
                    formatted: ByteSize(formatted),
                    wanted: ByteSize(wanted),
                });
            }
            let fits = chosen.superblock.check_device(size);
            fits.map_err(|source| CacheError::Superblock { path: path.clone(), source })?;
            return Ok(Looked { found: Some(chosen), former: None });
        }
        Err(SuperblockError::None) => {}
        Err(e @ SuperblockError::Damaged) => {
            return Err(CacheError::Damaged { path: path.clone(), why: e.to_string() });
        }
        Err(source) => return Err(CacheError::Superblock { path: path.clone(), source }),
    }
    let mut tail = vec![0; (TAIL_BYTES as u64).min(size) as usize];
    device.read_at(size - tail.len() as u64, &mut tail)?;
    if let Some(found) = Signature::detect(&head).or_else(|| Signature::detect_tail(&tail)) {
        return Err(CacheError::Foreign { path: path.clone(), what: found.name.to_owned() });
    }
    Ok(Looked { found: None, former: None })
}

/// A drive that takes part; formats it, if it is new.
fn one(
    medium: Medium,
    looked: Looked,
    member: Member,
    warnings: &mut Vec<String>,
) -> Result<Taken, CacheError> {
    let place = usize::from(member.part().place);
    let Member { superblock: says, fresh } = member;
    let superblocks = match looked.found {
        Some(found) if !fresh => Superblocks::found(found),
        held => {
            if held.is_some() {
                warnings.push(format!(
                    "flash '{}' was away while another drive was given its place: it begins anew, empty",
                    medium.path.display()
                ));
            }
            let device = medium.device.as_ref();
            // Both copies are void before the new one is written: an old one must not win after a torn write.
            device.write_at(0, &AlignedBuf::zeroed(2 * PAGE_SIZE))?;
            device.sync()?;
            let mut superblocks = Superblocks::formatted(says.clone());
            superblocks.write(&mut Head(device), says.clone())?;
            if let Some(former) = looked.former {
                Region::forget(&former.to_string());
            }
            superblocks
        }
    };
    Ok(Taken { place, medium, superblocks, says, fresh })
}

/// That no drive is named twice.
pub(in crate::kv) fn each_once<'a>(
    paths: impl Iterator<Item = &'a Path> + Clone,
) -> Result<(), CacheError> {
    for (i, path) in paths.clone().enumerate() {
        if paths.clone().take(i).any(|other| super::super::own_files::is_same(other, path)) {
            return Err(CacheError::DriveTwice(path.to_owned()));
        }
    }
    Ok(())
}
