//! The formats: their names, and telling them apart.

use std::fmt;
use std::str::FromStr;

use crate::error::TraceError;
use crate::input::Input;
use crate::native::{self, Native};
use crate::read::text::{MILLISECOND, split, words};
use crate::read::{Decode, Fault, Out, binary, block, block_binary, kv};

macro_rules! formats {
    ($($variant:ident, $name:literal, [$($alias:literal),*], $about:literal;)*) => {
        /// A trace format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Format {
            $(#[doc = $about] $variant,)*
        }

        impl Format {
            /// Every format.
            pub const ALL: &'static [Format] = &[$(Format::$variant,)*];

            /// The name used with `--format`.
            pub fn name(self) -> &'static str {
                match self { $(Format::$variant => $name,)* }
            }

            /// What it is, in one line.
            pub fn about(self) -> &'static str {
                match self { $(Format::$variant => $about,)* }
            }

            fn aliases(self) -> &'static [&'static str] {
                match self { $(Format::$variant => &[$($alias),*],)* }
            }
        }
    };
}

formats! {
    Larder, "larder", ["native"], "Larder's own: compact, checked, with everything a request has";
    Memcachier, "memcachier", ["lsmsim", "lsm-sim", "memcachier-csv"],
        "Memcachier and lsm-sim csv: time,application,type,key size,value size,key id,hit";
    Twitter, "twitter", ["twitter-csv"], "Twitter csv: timestamp,key,key size,value size,client,operation,ttl";
    CacheLib, "cachelib", ["cachelib-csv", "cachelib-kv", "cachelib-block"],
        "CacheLib csv, kvcache of every version and block store: columns by header, op_count requests a line";
    Mooncake, "mooncake", ["mooncake-jsonl"], "Mooncake jsonl: a request per block hash";
    Tragen, "tragen", [], "Tragen csv: time,id,size";
    WebCacheSim, "webcachesim", ["adaptsize", "wiki", "lrb"], "webcachesim: time id size, blanks between";
    IbmCos, "ibm-cos", ["ibm"], "IBM object store: time REST.VERB.OBJECT key size";
    TencentPhoto, "tencent-photo", [], "Tencent photo cache: time id format category bytes";
    OracleGeneral, "oracle-general", ["oraclegeneral", "oracleGeneral"],
        "libCacheSim oracleGeneral: 24-byte binary records";
    OracleGeneralOpNs, "oracle-general-opns", ["oraclegeneralopns", "oracleGeneralOpNS"],
        "libCacheSim oracleGeneralOpNS: 27-byte binary records with operation and name space";
    Twr, "twr", [], "libCacheSim twr: 20-byte binary records";
    TwrNs, "twr-ns", ["twrns"], "libCacheSim twrNS: 22-byte binary records with name space";
    StandardIqi, "standard-iqi", ["iqi"], "libCacheSim IQI: u32 time, u64 id, u32 size";
    StandardIqq, "standard-iqq", ["iqq"], "libCacheSim IQQ: u32 time, u64 id, u64 size";
    StandardIii, "standard-iii", ["iii"], "libCacheSim III: u32 time, u32 id, u32 size";
    U32Be, "u32be", ["caffeine", "cache2k", "w106"], "Keys of 32 bits, big-endian (Caffeine's simulator)";
    I64Be, "i64be", ["corda", "scarab"], "Keys of 64 bits, big-endian (Caffeine's simulator)";
    Arc, "arc", ["lis"], "ARC .lis: first block, blocks, ignored, sequence number";
    Lirs, "lirs", [], "LIRS: a block number a line, '*' between phases";
    Txt, "txt", ["plain"], "One id a line";
    Csv, "csv", [], "csv with the columns named by --columns, or by a header that can be understood";
    Msr, "msr", ["msr-cambridge"], "MSR Cambridge csv: timestamp,host,disk,Read|Write,offset,size,response time";
    Etw, "etw", ["ms-enterprise"], "Microsoft enterprise traces: DiskRead and DiskWrite lines after EndHeader";
    Spc, "spc", ["umass"], "SPC: ASU,LBA,size,R|W,time";
    Alibaba, "alibaba", [], "Alibaba block storage 2020: device,R|W,offset,length,timestamp";
    Tencent, "tencent", [], "Tencent block storage: timestamp,offset,size,type,volume";
    Systor, "systor", [], "SYSTOR '17: timestamp,response,R|W,LUN,offset,size";
    K5Cloud, "k5cloud", [], "K5cloud: volume,time,R|W,offset,size";
    FlashNet, "flashnet", [], "FlashNet: time,latency,read,size,offset,…";
    Replayer, "replayer", ["heimdall"], "Heimdall's replayer: time_ms device offset size read";
    DiskSim, "disksim", [], "DiskSim ascii: time_ms device sector sectors flags (1 read)";
    MqSim, "mqsim", ["ssdsim", "dtrs"], "MQSim and SSDSim: time_ns device sector sectors type (1 read)";
    Fiu, "fiu", [], "FIU: time pid process sector sectors R|W major minor md5";
    Baleen, "baleen", ["tectonic"], "Baleen (Tectonic): block_id io_offset io_size op_time op_name …";
    Thesios, "thesios", [], "Thesios csv with header";
    BlkParse, "blkparse", [], "blkparse text: queue events, or dispatches where there are none";
    BlkTrace, "blktrace", [], "blktrace binary: queue events";
    IoLog, "iolog", ["fio"], "fio's I/O log, versions 2 and 3";
    Vscsi1, "vscsi1", [], "VMware vscsi, version 1: 32-byte records";
    Vscsi2, "vscsi2", ["vscsi"], "VMware vscsi, version 2: 40-byte records";
    Srt, "srt", ["hp-srt"], "HP SRT: text header, big-endian records";
    Lcs, "lcs", [], "libCacheSim lcs, both headers, versions 1 to 8";
}

impl Format {
    /// The names of all formats, for messages.
    pub fn known() -> String {
        Format::ALL.iter().map(|f| f.name()).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn decoder(
        self,
        columns: Option<kv::CsvColumns>,
    ) -> Result<Box<dyn Decode>, String> {
        Ok(match self {
            Format::Larder => Box::<Native>::default(),
            Format::Memcachier => kv::memcachier(),
            Format::Twitter => kv::twitter(),
            Format::CacheLib => kv::cachelib(),
            Format::Mooncake => kv::mooncake(),
            Format::Tragen => kv::tragen(),
            Format::WebCacheSim => kv::webcachesim(),
            Format::IbmCos => kv::ibm_cos(),
            Format::TencentPhoto => kv::tencent_photo(),
            Format::OracleGeneral => binary::oracle_general(),
            Format::OracleGeneralOpNs => binary::oracle_general_opns(),
            Format::Twr => binary::twr(false),
            Format::TwrNs => binary::twr(true),
            Format::StandardIqi => binary::standard(16),
            Format::StandardIqq => binary::standard(20),
            Format::StandardIii => binary::standard(12),
            Format::U32Be => binary::big_endian_keys(4),
            Format::I64Be => binary::big_endian_keys(8),
            Format::Arc => kv::arc(),
            Format::Lirs => kv::lirs(),
            Format::Txt => kv::txt(),
            Format::Csv => kv::csv(
                columns.ok_or("format csv needs --columns, such as obj-id-col=2,obj-size-col=3")?,
            ),
            Format::Msr => block::msr(),
            Format::Etw => block::etw(),
            Format::Spc => block::spc(),
            Format::Alibaba => block::alibaba(),
            Format::Tencent => block::tencent(),
            Format::Systor => block::systor(),
            Format::K5Cloud => block::k5cloud(),
            Format::FlashNet => block::flashnet(),
            Format::Replayer => block::replayer(),
            Format::DiskSim => block::disksim(MILLISECOND),
            Format::MqSim => block::disksim(1),
            Format::Fiu => block::fiu(),
            Format::Baleen => block::baleen(),
            Format::Thesios => block::thesios(),
            Format::BlkParse => block::blkparse(),
            Format::BlkTrace => Box::new(block_binary::BlkTrace),
            Format::IoLog => block::iolog(),
            Format::Vscsi1 => block_binary::vscsi(1),
            Format::Vscsi2 => block_binary::vscsi(2),
            Format::Srt => Box::<block_binary::Srt>::default(),
            Format::Lcs => Box::<block_binary::Lcs>::default(),
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = TraceError;

    fn from_str(text: &str) -> Result<Format, TraceError> {
        let lower = text.to_ascii_lowercase();
        Format::ALL
            .iter()
            .copied()
            .find(|f| f.name() == lower || f.aliases().iter().any(|a| a.eq_ignore_ascii_case(text)))
            .ok_or_else(|| TraceError::UnknownFormat {
                name: text.to_owned(),
                known: Format::known(),
            })
    }
}

/// Bytes at the start of a trace that detection looks at.
const SAMPLE: usize = 64 << 10;
/// Lines or records at the start that detection looks at.
const SAMPLE_RECORDS: usize = 200;

/// A format as told from the contents, and why.
pub(crate) struct Detected {
    pub(crate) format: Format,
    pub(crate) columns: Option<kv::CsvColumns>,
    pub(crate) why: String,
}

/// What the start of a file looks like.
struct Sample<'a> {
    head: &'a [u8],
    /// The whole lines of the head, when it is text.
    lines: Vec<&'a [u8]>,
    whole: bool,
}

/// Tells the format from the first bytes: signatures first, then the formats whose decoder accepts every record of the
/// sample, the most particular layout first. Returns the format and why.
pub(crate) fn detect(input: &mut Input) -> Result<Detected, TraceError> {
    let file = input.file().to_owned();
    let packed = input.compression().name();
    let head = input.peek(SAMPLE)?.to_vec();
    let undetected = |reason: String| TraceError::Undetected {
        file: file.clone(),
        reason,
        known: Format::known(),
    };
    if head.is_empty() {
        let (file, reason, known) = (file.clone(), "it is empty".to_owned(), String::new());
        return Err(TraceError::Undetected { file, reason, known });
    }
    let whole = head.len() < SAMPLE;
    let is_text = !head.iter().any(|&b| is_control(b));
    let usable = match memchr::memrchr(b'\n', &head) {
        Some(at) if !whole => &head[..at],
        _ => &head[..],
    };
    // With their numbers in the file.
    let (numbers, lines): (Vec<usize>, Vec<&[u8]>) = (1..)
        .zip(usable.split(|&b| b == b'\n').map(|l| l.strip_suffix(b"\r").unwrap_or(l)))
        .filter(|(_, l)| !l.trim_ascii().is_empty())
        .take(SAMPLE_RECORDS)
        .unzip();
    let sample = Sample { head: &head, lines, whole };
    let mut found = if is_text { detect_text(&sample) } else { detect_binary(&sample) };
    let mut behind = String::new();
    if found.is_none()
        && let Some((odd, format, why)) = all_but_one(&sample)
    {
        // The first line may be a header: without it, what fits need not be the trace's format.
        if odd == 0 {
            behind = format!(" (the lines behind it are as of {format})");
        } else {
            // Reading says what is wrong with it, and where.
            found = Some((format, format!("{why}, but for line {}", numbers[odd])));
        }
    }
    // One line with bytes that are no text does not make the file binary.
    let odd = sample.lines.iter().filter(|l| is_odd(l)).count();
    let is_text = is_text || odd == 1 && sample.lines.len() >= ENOUGH_LINES;
    if found.is_none()
        && is_text
        && let Some((columns, why)) =
            sample.lines.first().and_then(|l| kv::CsvColumns::from_header(l))
    {
        return Ok(Detected {
            format: Format::Csv,
            columns: Some(columns),
            why: format!("{packed}; {why}"),
        });
    }
    match found {
        Some((format, why)) => {
            Ok(Detected { format, columns: None, why: format!("{packed}; {why}") })
        }
        None if is_text => {
            let first = sample.lines.first().copied().unwrap_or_default();
            let is_json = first.starts_with(b"{");
            let hint = if is_json {
                " (of cachebench's JSON a generator makes a trace: gen:cachebench?dir=FOLDER)"
            } else {
                &behind
            };
            let first = crate::error::quote(first);
            let reason = match fitting(&sample).filter(|_| behind.is_empty()) {
                None => format!("{packed}, text whose first line {first} fits none{hint}"),
                Some((last, format)) => format!(
                    "{packed}, text whose line {} {} does not fit {format}, as the lines before it do, nor another",
                    numbers[last + 1],
                    crate::error::quote(sample.lines[last + 1])
                ),
            };
            Err(undetected(reason))
        }
        None => Err(undetected(format!(
            "{packed}, binary that starts with {}; formats without a signature (keys alone, IQI, twr, …) must be named",
            crate::error::quote(&head[..head.len().min(16)])
        ))),
    }
}

fn fields(line: &[u8], delimiter: Option<u8>) -> usize {
    match delimiter {
        Some(d) => line.split(|&b| b == d).count(),
        None => line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty()).count(),
    }
}

/// What no text has.
fn is_control(b: u8) -> bool {
    b < 32 && !b"\t\r\n\x0c".contains(&b)
}

fn is_odd(line: &[u8]) -> bool {
    line.iter().any(|&b| is_control(b))
}

/// Lines below which one that is left out says nothing of the others.
const ENOUGH_LINES: usize = 10;

/// A line, counted from 0, without which the others of the sample fit a format: a damaged one. The format, and why.
fn all_but_one(s: &Sample<'_>) -> Option<(usize, Format, String)> {
    if s.lines.len() < ENOUGH_LINES {
        return None;
    }
    // Bytes that are no text in more than one line are not one line's damage.
    let mut suspects: Vec<usize> = (0..s.lines.len()).filter(|&i| is_odd(s.lines[i])).collect();
    match suspects.len() {
        0 => suspects = (0..s.lines.len()).collect(),
        1 => {}
        _ => return None,
    }
    suspects.into_iter().find_map(|odd| {
        let mut lines = s.lines.clone();
        lines.remove(odd);
        let (format, why) = detect_text(&Sample { lines, ..*s })?;
        Some((odd, format, why))
    })
}

/// The last line, counted from 0, up to which the lines of the sample fit a format, and that format; none where they are too
/// few to say anything, or nothing follows.
fn fitting(s: &Sample<'_>) -> Option<(usize, Format)> {
    let fits = |last: usize| {
        let lines = s.lines[..=last].to_vec();
        detect_text(&Sample { lines, ..*s }).map(|(format, _)| (last, format))
    };
    (0..s.lines.len().saturating_sub(1)).map_while(fits).last().filter(|(last, _)| *last > 1)
}

/// Whether every line of the sample decodes.
fn accepts(format: Format, lines: &[&[u8]]) -> bool {
    let mut joined = lines.join(&b'\n');
    joined.push(b'\n');
    let Ok(mut decode) = format.decoder(None) else { return false };
    let Ok(mut input) = Input::new("sample", Box::new(std::io::Cursor::new(joined))) else {
        return false;
    };
    let mut out = Out::default();
    loop {
        match decode.step(&mut input, &mut out) {
            Ok(true) => {}
            Ok(false) => return true,
            Err(Fault::Input(_) | Fault::Record(..)) => return false,
        }
    }
}

fn detect_text(s: &Sample<'_>) -> Option<(Format, String)> {
    let first = *s.lines.first()?;
    let n = s.lines.len();
    let has = |needle: &[u8]| memchr::memmem::find(first, needle).is_some();
    // Layouts with a header or an unmistakable word.
    if first.starts_with(b"{") && has(b"\"hash_ids\"") {
        return Some((Format::Mooncake, "JSON lines with \"hash_ids\"".to_owned()));
    }
    if (has(b"key") || has(b"block_id")) && has(b"op_count") {
        return Some((Format::CacheLib, "a csv header with op_count".to_owned()));
    }
    if first.starts_with(b"fio version") {
        return Some((Format::IoLog, "'fio version' in the first line".to_owned()));
    }
    if first.starts_with(b"BeginHeader") {
        return Some((Format::Etw, "BeginHeader in the first line".to_owned()));
    }
    if has(b"filename") && has(b"file_offset") {
        return Some((Format::Thesios, "a csv header with filename and file_offset".to_owned()));
    }
    if first.starts_with(b"#") && has(b"io_offset") {
        return Some((Format::Baleen, "a '#' header with io_offset".to_owned()));
    }
    // Layouts told by their number of columns and by what every line of the sample holds.
    let commas = |range: std::ops::RangeInclusive<usize>| {
        s.lines.iter().all(|l| range.contains(&fields(l, Some(b','))))
    };
    let blanks = |range: std::ops::RangeInclusive<usize>| {
        s.lines.iter().all(|l| range.contains(&fields(l, None)))
    };
    let five = blanks(5..=5);
    let column =
        |i: usize, test: fn(&[u8]) -> bool| s.lines.iter().all(|l| blank(l, i).is_some_and(test));
    let fraction = |l: &[u8]| l.contains(&b'.');
    let candidates: [(Format, bool, &str); 21] = [
        (Format::BlkParse, is_blkparse(first), "major,minor cpu sequence time pid action"),
        (Format::Twitter, commas(7..=7), "7 columns with an operation's name in the 6th"),
        (
            Format::FlashNet,
            commas(7..=7) && same_sizes(&s.lines),
            "7 columns, the 3rd 0 or 1, the 4th a size in whole sectors and equal to the 7th",
        ),
        (Format::Memcachier, commas(6..=7), "6 or 7 columns with a type from 1 to 7 in the 3rd"),
        (Format::Msr, commas(6..=7), "6 or 7 columns with Read or Write in the 4th"),
        (Format::Systor, commas(6..=6), "6 columns with R or W in the 3rd"),
        (Format::Alibaba, commas(5..=5), "5 columns with R or W in the 2nd"),
        (Format::K5Cloud, commas(5..=5), "5 columns with R or W in the 3rd"),
        (Format::Spc, commas(5..=8), "at least 5 columns with R or W in the 4th"),
        (Format::Tencent, commas(5..=5), "5 columns with 0 or 1 in the 4th"),
        (Format::Tragen, commas(3..=3), "3 columns time,id,size"),
        (Format::IbmCos, blanks(3..=6) && has(b" REST."), "REST.… in the 2nd column"),
        (Format::Fiu, blanks(8..=9), "8 or 9 columns with R or W in the 6th"),
        (
            Format::Arc,
            blanks(4..=4) && numbered(&s.lines),
            "4 columns, the 3rd 0 and the 4th counting up",
        ),
        (
            Format::Replayer,
            five && s.lines.iter().any(|l| blank(l, 3).is_some_and(whole_kib))
                && column(3, whole_sectors),
            "5 columns whose 4th is a size in bytes (whole sectors)",
        ),
        (
            Format::DiskSim,
            five && s.lines.iter().any(|l| blank(l, 0).is_some_and(fraction)),
            "5 columns: a time with a fraction, device, sector, sectors, flags",
        ),
        (Format::MqSim, five, "5 columns: a whole time, device, sector, sectors, type"),
        (Format::WebCacheSim, blanks(3..=3), "3 columns time id size"),
        (Format::TencentPhoto, blanks(5..=8), "time, hexadecimal id, format, category, bytes"),
        (Format::Lirs, blanks(1..=1) && commas(1..=1), "a block number a line"),
        (Format::Txt, blanks(1..=1) && commas(1..=1), "one word a line"),
    ];
    candidates
        .into_iter()
        .find(|(format, shaped, _)| *shaped && accepts(*format, &s.lines))
        .map(|(format, _, why)| (format, format!("text, each of the first {n} lines has {why}")))
}

/// Column `i` (from 0) of a line with blanks between.
fn blank(line: &[u8], i: usize) -> Option<&[u8]> {
    line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty()).nth(i)
}

fn whole_sectors(text: &[u8]) -> bool {
    crate::request::parse_u64(text).is_some_and(|n| n.is_multiple_of(512))
}

/// A size in bytes; a count of sectors that large would be an I/O of half a megabyte or more in one request.
fn whole_kib(text: &[u8]) -> bool {
    crate::request::parse_u64(text).is_some_and(|n| n >= 1024 && n.is_multiple_of(1024))
}

/// FlashNet writes an I/O's size twice: whole sectors, and never none (as Memcachier's key sizes and misses may be).
fn same_sizes(lines: &[&[u8]]) -> bool {
    let same = |c: [&[u8]; 7]| {
        c[3] == c[6] && c[3] != b"0" && whole_sectors(c[3]) && matches!(c[2], b"0" | b"1")
    };
    lines.iter().all(|l| split::<7>(l, b',').is_some_and(same))
}

fn is_blkparse(line: &[u8]) -> bool {
    let Ok([dev, cpu, sequence, time, pid, action]) = words::<6>(line, "") else { return false };
    let number = |t: &[u8]| crate::request::parse_u64(t).is_some();
    split::<2>(dev, b',').is_some_and(|d| d.iter().all(|n| number(n)))
        && [cpu, sequence, pid].into_iter().all(number)
        && time.contains(&b'.')
        && action.len() <= 2
        && action.iter().all(u8::is_ascii_uppercase)
}

/// ARC: the third column is 0 and the fourth counts up by one.
fn numbered(lines: &[&[u8]]) -> bool {
    let last = |l: &&[u8]| {
        let [_, _, zero, sequence] = words::<4>(l, "").ok()?;
        (zero == b"0").then(|| crate::request::parse_u64(sequence)).flatten()
    };
    let sequence: Option<Vec<u64>> = lines.iter().map(last).collect();
    // Some files start every number anew or leave it 0 (the first lines of OLTP.lis).
    sequence.is_some_and(|s| s.windows(2).all(|w| w[1] == w[0] || w[1] == w[0] + 1))
}

fn detect_binary(s: &Sample<'_>) -> Option<(Format, String)> {
    let head = s.head;
    if head.starts_with(native::MAGIC) {
        return Some((Format::Larder, "the signature LRDTRACE".to_owned()));
    }
    if head.starts_with(block_binary::SRT_SIGNATURE) {
        return Some((Format::Srt, "the signature $$TR_IOREC".to_owned()));
    }
    if block_binary::is_blktrace(head) {
        return Some((Format::BlkTrace, "binary with blktrace's magic 0x656174".to_owned()));
    }
    if let Some(old) = block_binary::is_lcs(head) {
        let which = if old { "old header of 1,024 bytes" } else { "new header of 8,192 bytes" };
        return Some((Format::Lcs, format!("binary with an lcs {which}")));
    }
    for (version, format) in [(2, Format::Vscsi2), (1, Format::Vscsi1)] {
        if block_binary::is_vscsi(head, version) {
            return Some((
                format,
                format!("binary, the first two records carry vscsi version {version}"),
            ));
        }
    }
    let records = |len: usize| head.chunks_exact(len).take(SAMPLE_RECORDS);
    let fits = |len: usize| head.len() >= len && (!s.whole || head.len().is_multiple_of(len));
    // Times must not fall and sizes must be sane; a next access lies ahead or is absent.
    let oracle = |len: usize, next_at: usize| {
        let mut previous = 0;
        fits(len)
            && records(len).enumerate().all(|(i, r)| {
                let time = binary::u32_le(r, 0);
                let next = binary::u64_le(r, next_at) as i64;
                let ok = time >= previous
                    && binary::u32_le(r, 12) < 1 << 31
                    && (next == -1 || next > i as i64);
                previous = time;
                ok
            })
    };
    if oracle(24, 16) {
        return Some((
            Format::OracleGeneral,
            "binary, 24-byte records with rising times and next accesses".to_owned(),
        ));
    }
    if oracle(27, 19) && records(27).all(|r| r[16] <= 14) {
        return Some((
            Format::OracleGeneralOpNs,
            "binary, 27-byte records with rising times, operations and next accesses".to_owned(),
        ));
    }
    None
}
