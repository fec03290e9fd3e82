//! Metadata detection on images that mkfs made, judged by what debugfs, dumpe2fs and xfs_db say of them.
//!
//! Needs e2fsprogs and xfsprogs. Where they are not installed the tests are ignored.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use larder_base::Rng;
use larder_policy::block::BlockKind;
use larder_policy::block::detect::Detector;

/// The program, wherever the system administrator's programs are.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let all = path.split(':').chain(["/usr/sbin", "/sbin"]);
    all.map(|dir| Path::new(dir).join(name)).find(|file| file.is_file())
}

fn run(name: &str, arguments: &[&str]) -> String {
    let program = tool(name).unwrap_or_else(|| panic!("{name} is missing"));
    let done =
        Command::new(&program).args(arguments).stderr(Stdio::piped()).output().expect("starts");
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{name} {arguments:?}: {errors}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// A tree of files: many small ones, one directory with thousands, long names, a few larger files of random bytes, and files that look like
/// metadata.
fn tree(root: &Path) {
    let mut rng = Rng::new(1);
    let mut random = vec![0u8; 3 << 20];
    rng.fill(&mut random);
    for d in 0..25 {
        let dir = root.join(format!("directory-{d}")).join("below");
        fs::create_dir_all(&dir).unwrap();
        let count = if d == 3 { 1500 } else { 60 };
        for f in 0..count {
            let name = format!("{f}-{}", "long-name".repeat((f % 9) as usize));
            let len = rng.below(if count > 1000 { 100 } else { 20_000 }) as usize;
            fs::write(dir.join(name), &random[..len]).unwrap();
        }
    }
    for i in 0..4 {
        fs::write(root.join(format!("large-{i}")), &random[i << 10..]).unwrap();
    }
    fs::write(root.join("text"), "all work and no play makes jack a dull boy\n".repeat(20_000))
        .unwrap();
    fs::write(root.join("zero"), vec![0u8; 1 << 20]).unwrap();
}

/// How well blocks were told apart.
#[derive(Debug, Default)]
struct Score {
    right: u32,
    wrong: u32,
    missed: u32,
}

impl Score {
    fn count(&mut self, said: BlockKind, metadata: bool) {
        match (matches!(said, BlockKind::Metadata | BlockKind::Journal), metadata) {
            (true, true) => self.right += 1,
            (true, false) => self.wrong += 1,
            (false, true) => self.missed += 1,
            (false, false) => {}
        }
    }

    fn precision(&self) -> f64 {
        f64::from(self.right) / f64::from(self.right + self.wrong)
    }

    fn recall(&self) -> f64 {
        f64::from(self.right) / f64::from(self.right + self.missed)
    }
}

/// Shows the image to a detector and compares. `metadata` and `either` are blocks of `block` bytes; `either` may be called
/// anything.
fn judge(name: &str, image: &Path, block: u64, metadata: &BTreeSet<u64>, either: &BTreeSet<u64>) {
    let file = File::open(image).unwrap();
    let size = file.metadata().unwrap().len();
    let read = |offset: u64, len: u64| {
        let mut bytes = vec![0; len.min(size - offset) as usize];
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    let mut detector = Detector::new(size, Detector::DEFAULT_BLOCKS);
    let mut asked = 0;
    while let Some((offset, len)) = detector.next_wanted() {
        detector.observe(offset, &read(offset, len));
        asked += len;
    }
    let blocks: Vec<u64> = (0..size / block).filter(|b| !either.contains(b)).collect();
    let by_address = |detector: &Detector| {
        let mut score = Score::default();
        for b in &blocks {
            score.count(detector.classify(b * block, block), metadata.contains(b));
        }
        score
    };
    let asked_only = by_address(&detector);
    // Every block passes by once, in any order: what is said of it then, as a miss would be judged.
    let mut order = blocks.clone();
    Rng::new(5).shuffle(&mut order);
    let mut passing = Score::default();
    for b in order {
        passing.count(detector.observe(b * block, &read(b * block, block)), metadata.contains(&b));
    }
    let after = by_address(&detector);
    println!(
        "{name}: {} of {} blocks are metadata; {} KiB asked for, {} KiB of DRAM",
        metadata.len(),
        size / block,
        asked >> 10,
        detector.memory_bytes() >> 10,
    );
    for (when, score) in
        [("asked only", &asked_only), ("passing by", &passing), ("by address", &after)]
    {
        println!(
            "  {when}: precision {:.2} %, recall {:.2} % ({score:?})",
            100.0 * score.precision(),
            100.0 * score.recall()
        );
    }
    assert!(asked_only.precision() > 0.99 && asked_only.recall() > 0.5, "{name} {asked_only:?}");
    assert!(passing.precision() > 0.999 && passing.recall() > 0.995, "{name} {passing:?}");
    assert!(after.precision() > 0.999 && after.recall() > 0.995, "{name} {after:?}");
}

/// `12` or `12-15`.
fn add_range(text: &str, out: &mut BTreeSet<u64>) {
    let text = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let (a, b) = text.split_once('-').unwrap_or((text, text));
    if let (Ok(a), Ok(b)) = (a.parse::<u64>(), b.parse::<u64>()) {
        out.extend(a..=b);
    }
}

/// Blocks of metadata, as dumpe2fs and debugfs say.
fn ext4_metadata(image: &str, dir: &Path) -> (u64, BTreeSet<u64>) {
    let dump = run("dumpe2fs", &[image]);
    let field = |name: &str| -> u64 {
        let line =
            dump.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
        line.split_whitespace().last().unwrap().parse().unwrap()
    };
    let mut found: BTreeSet<u64> = BTreeSet::new();
    // With blocks of 1 KiB the boot block comes before the first superblock.
    found.insert(0);
    let places = [
        "superblock at",
        "Group descriptors at",
        "Group descriptor at",
        "GDT blocks at",
        "bitmap at",
        "Inode table at",
    ];
    for line in dump.lines().filter(|l| l.starts_with("  ")) {
        for place in places {
            for rest in line.split(place).skip(1) {
                add_range(
                    rest.split_whitespace().next().unwrap_or("").trim_end_matches(','),
                    &mut found,
                );
            }
        }
    }
    let used = field("Inode count:") - field("Free inodes:") + 16;
    let commands = dir.join("commands");
    let mut file = File::create(&commands).unwrap();
    for inode in (2..=used).filter(|&i| i != 7) {
        writeln!(file, "stat <{inode}>").unwrap();
    }
    let stats = run("debugfs", &["-f", commands.to_str().unwrap(), image]);
    let (mut number, mut directory) = (0, false);
    for line in stats.lines() {
        if let Some(rest) = line.strip_prefix("Inode: ") {
            number = rest.split_whitespace().next().unwrap().parse().unwrap();
            directory = line.contains("Type: directory");
        }
        if !line.starts_with('(') {
            continue;
        }
        for part in line.split(", ") {
            let Some((label, place)) = part.trim_start_matches('(').split_once("):") else {
                continue;
            };
            if directory || number == 8 || label.starts_with("ETB") || label.contains("IND") {
                add_range(place, &mut found);
            }
        }
    }
    (field("Block size:"), found)
}

/// An image with a [tree] of files.
fn ext4_image(dir: &Path, mkfs: &[&str]) -> PathBuf {
    let files = dir.join("files");
    tree(&files);
    let image = dir.join("image");
    File::create(&image).unwrap().set_len(128 << 20).unwrap();
    let text = image.to_str().unwrap();
    let mut arguments = vec!["-q", "-F", "-d", files.to_str().unwrap()];
    arguments.extend(mkfs);
    arguments.push(text);
    run("mkfs.ext4", &arguments);
    // An index for the large directory: mkfs makes none.
    let fsck = tool("e2fsck").expect("comes with mkfs.ext4");
    Command::new(fsck)
        .args(["-fyD", text])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    image
}

fn ext4(name: &str, mkfs: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let image = ext4_image(dir.path(), mkfs);
    let (block, metadata) = ext4_metadata(image.to_str().unwrap(), dir.path());
    judge(name, &image, block, &metadata, &BTreeSet::new());
}

#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn ext4_as_mkfs_makes_it() {
    ext4("ext4", &[]);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn ext4_with_small_blocks_and_no_checksums() {
    ext4("ext4, 1 KiB blocks", &["-b", "1024", "-O", "^metadata_csum,^64bit"]);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn ext4_with_meta_groups() {
    ext4("ext4, meta_bg", &["-b", "1024", "-O", "meta_bg,^resize_inode"]);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn ext4_with_two_backups_only() {
    ext4("ext4, sparse_super2", &["-b", "4096", "-O", "sparse_super2,^resize_inode"]);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn ext2() {
    ext4(
        "ext2",
        &["-b", "4096", "-O", "^has_journal,^extents,^flex_bg,^64bit,^metadata_csum,^huge_file"],
    );
}

/// What lies in the cache since an earlier run, and what the guest has in its memory, does not pass by: the directories are
/// known by what was asked for at the start.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "dumpe2fs", without = "debugfs"),
    ignore = "needs mkfs.ext4, dumpe2fs and debugfs (Debian: e2fsprogs)"
)]
fn directories_of_ext4_are_known_before_they_pass_by() {
    let cases: [&[&str]; 3] =
        [&[], &["-b", "1024", "-O", "^metadata_csum,^64bit"], &["-O", "^metadata_csum,^uninit_bg"]];
    for mkfs in cases {
        let dir = tempfile::tempdir().unwrap();
        let image = ext4_image(dir.path(), mkfs);
        let text = image.to_str().unwrap();
        let (block, _) = ext4_metadata(text, dir.path());
        let mut directories = BTreeSet::new();
        for number in 0..25 {
            for path in [format!("/directory-{number}"), format!("/directory-{number}/below")] {
                let blocks = run("debugfs", &["-R", &format!("blocks {path}"), text]);
                directories.extend(blocks.split_whitespace().map(|b| b.parse::<u64>().unwrap()));
            }
        }
        assert!(directories.len() > 50, "{directories:?}");
        let file = File::open(&image).unwrap();
        let size = file.metadata().unwrap().len();
        let mut detector = Detector::new(size, Detector::DEFAULT_BLOCKS);
        let mut asked = 0;
        while let Some((offset, len)) = detector.next_wanted() {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, offset).unwrap();
            detector.observe(offset, &bytes);
            asked += len;
        }
        let known = |b: &&u64| detector.classify(**b * block, block) == BlockKind::Metadata;
        let right = directories.iter().filter(known).count();
        assert_eq!(right, directories.len(), "{mkfs:?}: blocks of directories that are known");
        assert!(asked < 17 << 20, "{mkfs:?}: {asked} bytes asked for");
        // Written again as it is, a descriptor tells nothing new.
        let mut head = vec![0; 1 << 20];
        file.read_exact_at(&mut head, 0).unwrap();
        detector.observe(0, &head);
        assert_eq!(detector.next_wanted(), None, "{mkfs:?}");
    }
}

fn xfs(name: &str, mkfs: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    File::create(&image).unwrap().set_len(320 << 20).unwrap();
    let small = dir.path().join("small");
    fs::write(&small, [b'x'; 5000]).unwrap();
    let mut proto = String::from("/none\n0 0\nd--755 0 0\n");
    for d in 0..20 {
        proto += &format!("directory-{d} d--755 0 0\n");
        for f in 0..if d == 3 { 3000 } else { 200 } {
            let name = format!("a-file-with-quite-a-long-name-{f}");
            proto += &format!("{name} ---644 0 0 {}\n", small.display());
        }
        proto += "$\n";
    }
    proto += "$\n";
    let list = dir.path().join("proto");
    fs::write(&list, proto).unwrap();
    let text = image.to_str().unwrap();
    let mut arguments = vec!["-q", "-f", "-p", list.to_str().unwrap()];
    arguments.extend(mkfs);
    arguments.push(text);
    run("mkfs.xfs", &arguments);
    let shape = run(
        "xfs_db",
        &["-r", "-c", "sb 0", "-c", "p blocksize agcount agblocks agblklog dblocks", text],
    );
    let field = |name: &str| -> u64 {
        let line = shape
            .lines()
            .find(|l| l.starts_with(name))
            .unwrap_or_else(|| panic!("no {name} in {shape}"));
        line.split_whitespace().last().unwrap().parse().unwrap()
    };
    let (block, groups, group, shift) =
        (field("blocksize"), field("agcount"), field("agblocks"), field("agblklog"));
    let mut commands = vec!["-r".to_owned(), "-c".to_owned(), "blockget -n".to_owned()];
    for g in 0..groups {
        let here = group.min(field("dblocks") - g * group);
        commands.extend(["-c".to_owned(), format!("fsblock {}", g << shift)]);
        commands.extend(["-c".to_owned(), format!("blockuse -c {here}")]);
    }
    commands.push(text.to_owned());
    let arguments: Vec<&str> = commands.iter().map(String::as_str).collect();
    let use_of = run("xfs_db", &arguments);
    let (mut metadata, mut either) = (BTreeSet::new(), BTreeSet::new());
    let mut seen = 0;
    for line in use_of.lines() {
        // block 0 (0/0) type sb
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(place), Some(kind)) = (words.get(2), words.get(4)) else { continue };
        let Some((g, b)) = place.trim_matches(|c| c == '(' || c == ')').split_once('/') else {
            continue;
        };
        let number = g.parse::<u64>().unwrap() * group + b.parse::<u64>().unwrap();
        seen += 1;
        match *kind {
            "data" | "free1" | "free2" | "unknown" => {}
            // Blocks kept for trees to grow into: free, whatever they held.
            "freelist" => _ = either.insert(number),
            _ => _ = metadata.insert(number),
        }
    }
    assert_eq!(seen, field("dblocks"), "xfs_db named every block");
    judge(name, &image, block, &metadata, &either);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.xfs", without = "xfs_db"),
    ignore = "needs mkfs.xfs and xfs_db (Debian: xfsprogs)"
)]
fn xfs_as_mkfs_makes_it() {
    xfs("xfs", &[]);
}

#[test]
#[cfg_attr(
    any(without = "mkfs.xfs", without = "xfs_db"),
    ignore = "needs mkfs.xfs and xfs_db (Debian: xfsprogs)"
)]
fn xfs_with_large_directory_blocks_and_small_blocks() {
    xfs(
        "xfs, 1 KiB blocks, 8 KiB directory blocks",
        &["-b", "size=1024", "-n", "size=8192", "-i", "size=512"],
    );
}

#[test]
#[cfg_attr(
    any(without = "mkfs.xfs", without = "xfs_db"),
    ignore = "needs mkfs.xfs and xfs_db (Debian: xfsprogs)"
)]
fn xfs_version_4() {
    xfs("xfs version 4", &["-m", "crc=0,finobt=0,rmapbt=0,reflink=0,bigtime=0,inobtcount=0"]);
}
