//! Every reader on a small sample of its format, and on thousands of damaged ones.

use std::io::{Cursor, Write};

use larder_base::{Nanos, Rng};
use larder_trace::{
    Class, CsvColumns, Format, NativeWriter, Op, Options, Request, TraceError, Writer, open, read,
};

mod samples;

use samples::samples;

fn decode(
    bytes: &[u8],
    format: Option<Format>,
    skip_bad: bool,
) -> (Vec<Request>, Option<TraceError>, u64) {
    let options = Options { format, skip_bad, ..Options::default() };
    let mut trace = match read(
        "sample",
        Box::new(Cursor::new(bytes.to_vec())),
        Some(bytes.len() as u64),
        &options,
    ) {
        Ok(trace) => trace,
        Err(e) => return (Vec::new(), Some(e), 0),
    };
    let mut all = Vec::new();
    while let Some(next) = trace.reader.next() {
        match next {
            Ok(request) => all.push(request),
            Err(e) => return (all, Some(e), trace.reader.skipped()),
        }
        if all.len() > 200_000 {
            break;
        }
    }
    (all, None, trace.reader.skipped())
}

#[test]
fn samples_decode_and_are_recognised() {
    let here: Vec<Format> = samples().iter().map(|s| s.0).collect();
    let missing: Vec<_> = Format::ALL.iter().filter(|f| !here.contains(f)).collect();
    assert!(missing.is_empty(), "no sample of {missing:?}");
    for (format, told, bytes, second) in samples() {
        let (all, error, _) = decode(&bytes, Some(format), false);
        assert!(error.is_none(), "{format}: {error:?}");
        assert_eq!(all.get(1), Some(&second), "{format}: {all:?}");
        if told {
            let options = Options::default();
            let trace = read("sample", Box::new(Cursor::new(bytes)), None, &options);
            let found = trace.map(|t| (t.format, t.explanation)).map_err(|e| e.to_string());
            assert_eq!(found.as_ref().map(|f| f.0), Ok(Some(format)), "{found:?}");
        }
    }
}

/// No damage makes a reader panic, loop or hand out more than the input can hold; with `skip_bad` every reader comes to
/// the end of its input.
#[test]
fn damaged_samples_never_panic() {
    let mut rng = Rng::new(77);
    let mut errors = 0u32;
    for (format, _, bytes, _) in samples() {
        for round in 0..400 {
            let mut damaged = bytes.clone();
            // Long headers are mostly padding: aim behind them half of the time.
            let from = if round % 2 == 0 { damaged.len().saturating_sub(120) } else { 0 };
            for _ in 0..=rng.below(5) {
                if damaged.is_empty() {
                    break;
                }
                let at = from.min(damaged.len() - 1)
                    + rng.below((damaged.len() - from.min(damaged.len() - 1)) as u64) as usize;
                match rng.below(5) {
                    0 => damaged[at] = rng.next_u64() as u8,
                    1 => drop(damaged.remove(at)),
                    2 => damaged.insert(at, b"0123456789,.- \n\0\xff*+eRW"[rng.below(21) as usize]),
                    3 => damaged.truncate(at),
                    _ => damaged[at] ^= 1 << rng.below(8),
                }
            }
            errors += u32::from(decode(&damaged, Some(format), false).1.is_some());
            let (_, error, _) = decode(&damaged, Some(format), true);
            let record = matches!(error, Some(TraceError::Record(_)));
            assert!(!record, "{format}: a bad record stopped a reader that skips them: {error:?}");
            let _ = decode(&damaged, None, true);
        }
    }
    assert!(errors > 2000, "damage is noticed: {errors}");
}

#[test]
fn errors_name_file_place_and_what_was_expected() {
    let (all, error, _) =
        decode(b"1,1,1,0,68,1,1\n2,1,9,0,68,1,1\n", Some(Format::Memcachier), false);
    assert_eq!(all.len(), 1);
    let text = error.unwrap().to_string();
    for part in ["sample", "line 2", "a type from 1", "'9'", "memcachier"] {
        assert!(text.contains(part), "{text}");
    }
    let (all, error, skipped) =
        decode(b"1,1,1,0,68,1,1\nx\n3,1,1,0,68,1,1\n", Some(Format::Memcachier), true);
    assert_eq!((all.len(), error.is_none(), skipped), (2, true, 1));
    // A record cut short in a binary format: its byte offset.
    let text = decode(&[0; 40], Some(Format::OracleGeneral), false).1.unwrap().to_string();
    assert!(text.contains("byte 24") && text.contains("after 16 bytes"), "{text}");
    // An op_count that claims a great many requests costs no memory.
    let bomb = b"key,op,size,op_count,key_size\n5,GET,30,18446744073709551615,16\n";
    assert!(decode(bomb, None, false).0.len() > 200_000);
    let empty = decode(b"", None, false).1.unwrap().to_string();
    assert!(empty.contains("it is empty") && !empty.contains("--format"), "{empty}");
}

#[test]
fn a_broken_archive_is_an_error_of_reading() {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&b"1 2 3\n".repeat(10_000)).unwrap();
    let mut packed = gz.finish().unwrap();
    packed.truncate(packed.len() / 2);
    let error = decode(&packed, Some(Format::WebCacheSim), true).1;
    assert!(matches!(error, Some(TraceError::Read { .. })), "{error:?}");
}

/// Written and read back, every request is the same; for formats that hold less, what they hold.
#[test]
fn written_traces_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let spec = "gen:memcachier?objects=2000&requests=30000&seed=3&rate=1000";
    let made: Vec<Request> =
        open(spec, &Options::default()).unwrap().reader.map(|r| r.unwrap()).collect();
    let write = |name: &str, format| {
        let file = dir.path().join(name).to_string_lossy().into_owned();
        let mut writer = Writer::create(&file, format).unwrap();
        for r in &made {
            writer.push(r).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), made.len() as u64);
        let trace = open(&file, &Options::default()).unwrap();
        assert_eq!(trace.format, Some(format), "{}", trace.explanation);
        let back: Vec<Request> = trace.reader.map(|r| r.unwrap()).collect();
        assert_eq!(back.len(), made.len());
        (std::fs::metadata(&file).unwrap().len(), back)
    };
    for name in ["a.lt", "a.lt.gz", "a.lt.xz", "a.lt.zst"] {
        let (bytes, back) = write(name, Format::Larder);
        assert_eq!(back, made);
        assert!(
            bytes < made.len() as u64 * 24,
            "{name}: {bytes} bytes for {} requests",
            made.len()
        );
    }
    let (_, back) = write("b.csv.zst", Format::Csv);
    assert_eq!(back, made);
    let (_, back) = write("c.csv.gz", Format::Memcachier);
    assert_eq!(back, made.iter().map(|r| Request { ttl: 0, ..*r }).collect::<Vec<_>>());
    let (_, back) = write("d.bin", Format::OracleGeneral);
    assert!(back.iter().zip(&made).all(|(b, m)| b.id == m.id && b.size == m.size));
    let cannot = Writer::create("x", Format::Msr).err().unwrap().to_string();
    assert!(cannot.contains("can be read but not written"));
}

/// Blocks whose offsets count from zero lie side by side: the beginnings of two are not the same bytes.
#[test]
fn blocks_with_offsets_of_their_own_do_not_lie_on_one_another() {
    let cachelib = "op_time,block_id,block_id_size,io_size,io_offset,user_name,user_namespace,op_name,op_count,host_name,rs_shard_id\n\
        1,7,40,4096,0,1,1,getChunkData.NotInitialized,1,1,1\n\
        2,8,40,4096,0,1,1,getChunkData.NotInitialized,1,1,1\n\
        3,7,40,4096,8192,1,1,getChunkData.NotInitialized,1,1,1\n";
    let baleen = "# block_id io_offset io_size op_time op_name\n7 0 4096 1 1\n8 0 4096 2 1\n7 8192 4096 3 1\n";
    for (format, text) in [(Format::CacheLib, cachelib), (Format::Baleen, baleen)] {
        let (all, error, _) = decode(text.as_bytes(), Some(format), false);
        assert!(error.is_none(), "{error:?}");
        let places: Vec<(u64, u64)> = all.iter().map(|r| (r.id, r.offset)).collect();
        assert_eq!(places, [(7, 0), (8, 16 << 20), (7, 8192)], "{format}");
    }
    let far = "# block_id io_offset io_size op_time op_name\n7 16777216 4096 1 1\n";
    let (_, error, _) = decode(far.as_bytes(), Some(Format::Baleen), false);
    assert!(error.unwrap().to_string().contains("within a block of 16 MiB"));
}

/// The same disk number of two hosts is two volumes; of one host, its number.
#[test]
fn disks_of_several_hosts_are_several_volumes() {
    let text = "1,usr,0,Read,0,4096,1\n2,hm,0,Read,0,4096,1\n3,usr,1,Read,0,4096,1\n4,hm,0,Write,0,4096,1\n";
    let (all, error, _) = decode(text.as_bytes(), Some(Format::Msr), false);
    assert!(error.is_none(), "{error:?}");
    let volumes: Vec<u32> = all.iter().map(|r| r.app).collect();
    assert_eq!((volumes[0], volumes[2]), (0, 1));
    assert!(volumes[1] > 63 && volumes[1] == volumes[3], "{volumes:?}");
}

/// Formats that keep less say what they leave out.
#[test]
fn a_writer_says_what_its_format_has_no_place_for() {
    let dir = tempfile::tempdir().unwrap();
    let set = Request { op: Op::Set, time: Some(Nanos(1_500_000_000)), ..Request::get(1, 10) };
    let io = Request::block(Op::Read, 3, 4096, 4096);
    for (format, requests, lost) in [
        (Format::WebCacheSim, [set, set], vec!["operations", "fractions of seconds"]),
        (Format::OracleGeneral, [io, io], vec!["operations", "offsets", "applications"]),
        (Format::Memcachier, [set, Request { ttl: 9, ..set }], vec!["times to live"]),
        (Format::Csv, [set, io], vec![]),
        (Format::Larder, [set, io], vec![]),
    ] {
        let file = dir.path().join(format.name()).to_string_lossy().into_owned();
        let mut writer = Writer::create(&file, format).unwrap();
        requests.iter().for_each(|r| writer.push(r).unwrap());
        assert_eq!(writer.left_out(), lost, "{format}");
    }
}

/// A csv keeps everything, block I/O with its classes and hosts, requests without times, and names what is no class or host.
#[test]
fn a_csv_reads_back_whole() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("io.csv").to_string_lossy().into_owned();
    let mut rng = Rng::new(8);
    for timed in [true, false] {
        let made: Vec<Request> = (0..5000u64)
            .map(|i| Request {
                time: timed.then_some(Nanos(i * 1_000_003)),
                offset: rng.below(1 << 50),
                op: Op::ALL[rng.below(Op::ALL.len() as u64) as usize],
                app: rng.below(1 << 32) as u32,
                ttl: rng.below(100) as u32,
                key_size: rng.below(250) as u32,
                class: Class::ALL[rng.below(3) as usize],
                host: rng.below(1 << 16) as u16,
                ..Request::get(rng.next_u64(), rng.below(1 << 30))
            })
            .collect();
        let mut writer = Writer::create(&file, Format::Csv).unwrap();
        made.iter().for_each(|r| writer.push(r).unwrap());
        writer.finish().unwrap();
        let back: Vec<Request> =
            open(&file, &Options::default()).unwrap().reader.map(|r| r.unwrap()).collect();
        assert_eq!(back, made);
    }
    let columns = CsvColumns::parse("obj-id-col=1,offset-col=2,class-col=3,host-col=4").unwrap();
    let options = Options { columns: Some(columns), ..Options::default() };
    for (line, words) in [
        ("5,0,inode,1", "a class (data, metadata, or nothing)"),
        ("5,0,data,70000", "a host (at most 65535)"),
        ("5,x,data,7", "offset"),
        ("5,0,data", "at least 4 columns"),
    ] {
        std::fs::write(&file, format!("1,4096,metadata,3\n{line}\n")).unwrap();
        let mut reader = open(&file, &options).unwrap().reader;
        let first = reader.next().unwrap().unwrap();
        assert_eq!((first.offset, first.class.name(), first.host), (4096, "metadata", 3));
        let e = reader.next().unwrap().unwrap_err().to_string();
        assert!(e.contains(words) && e.contains("io.csv"), "{e}");
    }
}

/// A native file that was cut short says so, wherever it was cut.
#[test]
fn native_knows_when_it_was_cut() {
    let mut w = NativeWriter::new(Vec::new()).unwrap();
    for i in 0..40_000u64 {
        w.push(&Request::get(larder_trace::mix(i), i)).unwrap();
    }
    let bytes = w.finish().unwrap();
    assert_eq!(decode(&bytes, None, false).0.len(), 40_000);
    let mut rng = Rng::new(1);
    for _ in 0..50 {
        let cut = rng.below(bytes.len() as u64) as usize;
        assert!(decode(&bytes[..cut], Some(Format::Larder), false).1.is_some(), "cut at {cut}");
    }
    // One damaged block loses its own records and no others.
    let mut bad = bytes.clone();
    bad[bytes.len() / 2] ^= 1;
    let (kept, error, skipped) = decode(&bad, None, true);
    assert!(
        error.is_none() && skipped == 1 && kept.len() > 25_000 && kept.len() < 40_000,
        "{} {skipped}",
        kept.len()
    );
}

/// Class and host survive the native format, and files of its first version, which had neither, are still read.
#[test]
fn native_holds_class_and_host_and_reads_version_1() {
    let spec = "gen:specsfs?size=8m&requests=5000&rate=100";
    let made: Vec<Request> =
        open(spec, &Options::default()).unwrap().reader.map(|r| r.unwrap()).collect();
    assert!(made.iter().any(|r| r.class == Class::Metadata));
    let mut w = NativeWriter::new(Vec::new()).unwrap();
    made.iter().for_each(|r| w.push(r).unwrap());
    let mut bytes = w.finish().unwrap();
    assert_eq!(decode(&bytes, None, false).0, made);
    bytes[8] = 3;
    let error = decode(&bytes, None, false).1.unwrap().to_string();
    assert!(error.contains("version 1 or 2") && error.contains("version 3"), "{error}");

    // op 1 (set) with application, key size and TTL; id +5, size 9. Then op 0 (get), id +1, size 2.
    let payload = [1u8 | 1 << 5, 10, 9, 7, 20, 60, 0, 2, 2];
    let mut old = b"LRDTRACE\x01\0\0\0\0\0\0\0".to_vec();
    old.extend(9u32.to_le_bytes());
    old.extend(2u32.to_le_bytes());
    old.extend(crc32c::crc32c(&payload).to_le_bytes());
    old.extend(payload);
    old.extend([0; 8]);
    old.extend(crc32c::crc32c(&2u64.to_le_bytes()).to_le_bytes());
    old.extend(2u64.to_le_bytes());
    let (all, error, _) = decode(&old, None, false);
    assert!(error.is_none(), "{error:?}");
    let first = Request { op: Op::Set, app: 7, key_size: 20, ttl: 60, ..Request::get(5, 9) };
    assert_eq!(all, [first, Request { op: Op::Get, id: 6, size: 2, ..first }]);
}

/// A record cut short, or replaced by rubbish, in every format: without `skip_bad` the error names file, place and
/// expectation; with it the record is counted.
#[test]
fn every_format_says_where_it_was_cut() {
    let mut silent = Vec::new();
    // Words are keys in txt; etw and blkparse have lines of other kinds, which are passed over: theirs are cut within.
    let within = |format, line: &[u8]| match format {
        Format::Etw => b"DiskWrite, 20, a".to_vec(),
        Format::BlkParse => b"8,16 3 6 1.5 3645 Q WS 16".to_vec(),
        _ => line.to_vec(),
    };
    for (format, _, bytes, _) in samples() {
        let whole = decode(&bytes, Some(format), false).0.len();
        let text = !bytes.contains(&0);
        // Text: the last line becomes a word. Binary: the last five bytes go.
        let line = bytes[..bytes.len() - 1].iter().rposition(|&b| b == b'\n').map_or(0, |n| n + 1);
        let cut = if text {
            [&bytes[..line], &within(format, b"rubbish\n")].concat()
        } else {
            bytes[..bytes.len() - 5].to_vec()
        };
        let (all, error, _) = decode(&cut, Some(format), false);
        let Some(error) = error else {
            silent.push(format);
            continue;
        };
        let said = error.to_string();
        let place = if text { "line " } else { "byte " };
        for part in ["sample", place, "expected", "found", format.name(), "--skip-bad"] {
            assert!(said.contains(part), "{format}: {said}");
        }
        let (kept, error, skipped) = decode(&cut, Some(format), true);
        // A sample of a single record has none left.
        let ended = match error {
            None => !kept.is_empty(),
            Some(TraceError::NoRequest(_)) => kept.is_empty(),
            Some(_) => false,
        };
        assert!(ended && skipped == 1, "{format}: {error:?}, {skipped} skipped");
        assert!(kept.len() >= all.len() && kept.len() <= whole, "{format}");
    }
    assert_eq!(silent, [Format::Txt]);
}

/// What holds no request is no trace: an empty file, or text of another kind for formats that pass over other lines.
#[test]
fn nothing_is_not_a_trace() {
    for &format in Format::ALL {
        let e = decode(b"", Some(format), false).1.unwrap().to_string();
        assert!(e.contains("sample") && (e.contains("byte 0") || e.contains("is empty")), "{e}");
    }
    for (format, text, words) in [
        (Format::Etw, "To whom it\nmay concern\n", "line 2: expected a request, found the end"),
        (Format::BlkParse, "CPU0 (8,16):\n Reads Queued: 0\n\n", "none in its 3 lines"),
        (Format::Csv, "time,op,id,size\n", "none in its 1 lines"),
    ] {
        let (all, error, _) = decode(text.as_bytes(), Some(format), false);
        let e = error.unwrap().to_string();
        assert!(all.is_empty() && e.contains(words) && !e.contains("--skip-bad"), "{e}");
        let (all, error, skipped) = decode(text.as_bytes(), Some(format), true);
        assert!(all.is_empty() && matches!(error, Some(TraceError::NoRequest(_))) && skipped == 0);
    }
    let none = NativeWriter::new(Vec::new()).unwrap().finish().unwrap();
    let (all, error, _) = decode(&none, None, false);
    assert!(all.is_empty() && error.is_none(), "{error:?}");
}

/// Untimed traces get times from the stated rate, in every format that has none.
#[test]
fn untimed_traces_get_times_from_a_rate() {
    for (format, _, bytes, _) in samples() {
        let untimed = decode(&bytes, Some(format), false).0.iter().all(|r| r.time.is_none());
        let options = Options { format: Some(format), rate: Some(4.0), ..Options::default() };
        let trace = read("sample", Box::new(Cursor::new(bytes)), None, &options).unwrap();
        let times: Vec<u64> = trace.reader.map(|r| r.unwrap().time.unwrap().0).collect();
        assert!(times.is_sorted(), "{format}: {times:?}");
        if untimed {
            let expected: Vec<u64> = (0..times.len() as u64).map(|n| n * 250_000_000).collect();
            assert_eq!(times, expected, "{format}");
        }
    }
}

/// What we write is found out again, also when it holds no keys' sizes and no hits (which once looked like FlashNet).
/// One damaged byte near the beginning: the format is told from the other lines, and the error names the line and what is
/// wrong with it, not the first.
#[test]
fn one_damaged_line_is_named_whichever_it_is() {
    type Line = fn(usize) -> String;
    let formats: [(Format, Line, usize); 5] = [
        (Format::Twitter, |i| format!("{i},key{},12,300,9,get,0", i % 7), 13),
        (Format::Msr, |i| format!("128166372{i:03}000000,srv,0,Read,{},4096,100", i * 4096), 25),
        (Format::Alibaba, |i| format!("7,R,{},4096,{}", i * 4096, 1_000_000 + i), 2),
        (Format::WebCacheSim, |i| format!("{i} {} 100", 17 + i % 5), 5),
        (Format::K5Cloud, |i| format!("{i},3,R,{},8192", i * 512), 4),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    for (format, line, at) in formats {
        // A letter or a control character for a digit, at the same place.
        for odd in [b'q', 0x11] {
            for damaged in [2, 3, 17, 60] {
                let mut text = Vec::new();
                for i in 1..=60 {
                    let mut bytes = line(i).into_bytes();
                    if i == damaged {
                        bytes[at] = odd;
                    }
                    text.extend(bytes);
                    text.push(b'\n');
                }
                std::fs::write(&path, &text).unwrap();
                let name = path.display().to_string();
                let case = format!("{format} line {damaged} {}", odd.escape_ascii());
                let trace =
                    open(&name, &Options::default()).unwrap_or_else(|e| panic!("{case}: {e}"));
                assert_eq!(trace.format, Some(format), "{case}");
                assert!(trace.explanation.contains(&format!("but for line {damaged}")), "{case}");
                let error = trace.reader.map(|r| r.err()).find_map(|e| e).unwrap().to_string();
                assert!(
                    error.contains(&format!("trace, line {damaged}: expected")),
                    "{case}: {error}"
                );
                let skipping = Options { skip_bad: true, ..Options::default() };
                assert_eq!(open(&name, &skipping).unwrap().reader.count(), 59, "{case}");
            }
        }
    }
}

/// Two damaged lines say nothing of the format; the error then names the first that does not go with those before it.
#[test]
fn where_no_format_fits_the_first_odd_line_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let refused = |text: &str| {
        std::fs::write(&path, text).unwrap();
        open(&path.display().to_string(), &Options::default()).err().unwrap().to_string()
    };
    let line = |i: usize| match i {
        7 | 9 => format!("{i},abc,12,3x0,9,get,0\n"),
        _ => format!("{i},abc,12,300,9,get,0\n"),
    };
    let text: String = (1..=20).map(line).collect();
    let error = refused(&text);
    assert!(error.contains("line 7 '7,abc,12,3x0,9,get,0' does not fit twitter"), "{error}");
    // Neither does a byte that is no text make a csv with a header binary.
    let csv: String =
        (1..=20).map(|i| format!("{i},{},10\n", if i == 9 { "\u{11}" } else { "5" })).collect();
    let text = format!("time,id,size\n{csv}");
    std::fs::write(&path, &text).unwrap();
    let trace = open(&path.display().to_string(), &Options::default()).unwrap();
    assert_eq!(trace.format, Some(Format::Csv));
    // A first line that is none of them need not be damage.
    let behind: String = (1..=20).filter(|i| *i != 7 && *i != 9).map(line).collect();
    let error = refused(&format!("zeit;wort\n{behind}"));
    let words = "first line 'zeit;wort' fits none (the lines behind it are as of twitter)";
    assert!(error.contains(words), "{error}");
}

#[test]
fn what_is_written_is_detected_again() {
    let dir = tempfile::tempdir().unwrap();
    for format in Writer::FORMATS {
        for seed in 0..20 {
            let path = dir.path().join(format!("{format}-{seed}"));
            let name = path.to_str().unwrap();
            let mut rng = Rng::new(seed);
            let mut writer = Writer::create(name, format).unwrap();
            for i in 0..300 {
                // Sectors too: sizes that a block trace could have.
                let size = if seed % 2 == 0 { rng.below(100_000) } else { 512 * rng.below(64) };
                let time = Some(Nanos::from_secs(i / 3));
                writer.push(&Request { time, ..Request::get(rng.below(50), size) }).unwrap();
            }
            writer.finish().unwrap();
            let trace = open(name, &Options::default()).unwrap();
            assert_eq!(trace.format, Some(format), "seed {seed}: {}", trace.explanation);
        }
    }
}
