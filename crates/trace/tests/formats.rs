//! Every reader on a small sample of its format, and on thousands of damaged ones.

use std::io::{Cursor, Write};

use larder_base::{Nanos, Rng};
use larder_trace::{
    Class, CsvColumns, Format, NativeWriter, Op, Options, Request, TraceError, Writer, open, read,
};

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

/// (format, detected without being named, sample, what its second request is).
fn samples() -> Vec<(Format, bool, Vec<u8>, Request)> {
    let us = |n: u64| Some(Nanos(n * 1000));
    let s = |n: u64| Some(Nanos::from_secs(n));
    let kv = |time, op, id, size| Request { time, op, ..Request::get(id, size) };
    let io =
        |time, op, dev, offset, size| Request { time, ..Request::block(op, dev, offset, size) };
    let mut out = Vec::new();
    let mut text = |f, told, t: &str, r| out.push((f, told, t.as_bytes().to_vec(), r));
    text(
        Format::Memcachier,
        true,
        "10.5,3,1,20,100,7,1\n11.5,3,2,20,200,8,0\n12.5,4,6,0,0,9,0\n",
        Request { app: 3, key_size: 20, ..kv(s(1), Op::Set, 8, 200) },
    );
    text(
        Format::Twitter,
        true,
        "5,abc,12,300,9,get,0\n6,77,2,40,9,set,3600\n",
        Request { key_size: 2, ttl: 3600, ..kv(s(1), Op::Set, 77, 40) },
    );
    text(
        Format::CacheLib,
        true,
        "key,op,size,op_count,key_size\n5,GET,30,2,16\n6,SET_LEASE,31,1,16\n",
        Request { key_size: 16, ..kv(None, Op::Get, 5, 30) },
    );
    text(
        Format::Mooncake,
        true,
        "{\"timestamp\": 5, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [3, 4]}\n",
        kv(s(0), Op::Get, 4, 4096),
    );
    text(Format::Tragen, true, "1,10,100\n2,11,50\n", kv(s(1), Op::Get, 11, 50));
    text(Format::WebCacheSim, true, "1 10 100\n2 11 50\n", kv(s(1), Op::Get, 11, 50));
    text(
        Format::IbmCos,
        true,
        "1000 REST.PUT.OBJECT ab 9\n2000 REST.GET.OBJECT ab 9 0 8\n",
        kv(s(1), Op::Get, larder_trace::hash_key(b"ab"), 9),
    );
    text(
        Format::TencentPhoto,
        false,
        "20160201000000 aa 0 1 100 x y\n20160301000001 aa 0 1 100 x y\n",
        kv(s(29 * 86_400 + 1), Op::Get, larder_trace::hash_key(b"aa:0:1"), 100),
    );
    text(Format::Arc, true, "5 2 0 0\n9 1 0 1\n", kv(None, Op::Get, 6, 1));
    text(Format::Lirs, true, "5\n*\n6\n", kv(None, Op::Get, 6, 1));
    text(Format::Txt, true, "a\n17\n", kv(None, Op::Get, 17, 1));
    text(Format::Csv, true, "time,op,id,size\n1,R,2,3\n2,W,4,5\n", kv(s(1), Op::Set, 4, 5));
    text(
        Format::Msr,
        true,
        "128166372003061629,hm,1,Read,4096,512,100\n128166372003061639,hm,1,Write,8192,1024,100\n",
        io(us(1), Op::Write, 1, 8192, 1024),
    );
    text(
        Format::Etw,
        true,
        "BeginHeader\nDiskRead, TimeStamp, Process, Thread, IrpPtr, ByteOffset, IOSize, ElapsedTime, DiskNum\nEndHeader\n\
         DiskRead, 10, a, 1, 0x1, 0x1000, 0x200, 5, 0\nDiskWrite, 20, a, 1, 0x1, 0x2000, 0x400, 5, 2\n",
        io(us(10), Op::Write, 2, 0x2000, 0x400),
    );
    text(Format::Spc, true, "0,8,512,R,0.5\n1,16,1024,w,1.5\n", io(s(1), Op::Write, 1, 8192, 1024));
    text(
        Format::Alibaba,
        true,
        "3,R,4096,512,1000000\n3,W,8192,512,2000000\n",
        io(s(1), Op::Write, 3, 8192, 512),
    );
    text(Format::Tencent, true, "10,8,1,0,5\n11,16,2,1,5\n", io(s(1), Op::Write, 5, 8192, 1024));
    text(
        Format::Systor,
        true,
        "10.0,0.1,R,4,0,512\n11.0,,W,4,512,512\n",
        io(s(1), Op::Write, 4, 512, 512),
    );
    text(
        Format::K5Cloud,
        true,
        "6,10.0,R,0,512\n6,11.0,W,512,512\n",
        io(s(1), Op::Write, 6, 512, 512),
    );
    text(
        Format::FlashNet,
        true,
        "0.000,114,1,4096,512,0.172,4096\n1000.000,1,0,512,1024,0.1,512\n",
        io(s(1), Op::Write, 0, 1024, 512),
    );
    text(
        Format::Replayer,
        true,
        "0.000 0 4096 4096 1\n1000.0 1 8192 512 0\n",
        io(s(1), Op::Write, 1, 8192, 512),
    );
    text(
        Format::DiskSim,
        true,
        "0.000 0 8 8 1\n1000.5 1 16 1 0\n",
        io(us(1_000_500), Op::Write, 1, 8192, 512),
    );
    text(Format::MqSim, true, "1000 0 8 8 1\n2000 1 16 1 0\n", io(us(1), Op::Write, 1, 8192, 512));
    text(
        Format::Fiu,
        true,
        "1000 5 bash 8 8 R 8 1 aa\n2000 5 bash 16 8 W 8 1 bb\n",
        io(us(1), Op::Write, 8 << 20 | 1, 8192, 4096),
    );
    text(
        Format::Baleen,
        true,
        "# block_id io_offset io_size op_time op_name\n7 0 512 1.0 1\n7 512 512 2.0 3\n",
        Request { id: 7, ..io(s(1), Op::Write, 0, 512, 512) },
    );
    text(
        Format::BlkParse,
        true,
        "  8,16   3        4     0.000011950  3645  Q   R 8 + 8 [java]\n\
         8,16 3 5 0.5 3645 D R 8 + 8 [java]\n8,16 3 6 1.000011950 3645 Q WSM 16 + 8 [java]\nCPU0 (8,16):\n",
        Request { class: Class::Metadata, ..io(s(1), Op::Write, 8 << 20 | 16, 8192, 4096) },
    );
    text(
        Format::IoLog,
        true,
        "fio version 2 iolog\n/dev/a add\n/dev/a open\n/dev/a read 0 512\n/dev/a wait 7\n/dev/a trim 4096 512\n/dev/a close\n",
        io(s(0), Op::Trim, 0, 4096, 512),
    );
    let mut binary = |f, told, records: &[Vec<u8>], r| out.push((f, told, records.concat(), r));
    let pack = |parts: &[(u64, usize)]| -> Vec<u8> {
        parts.iter().flat_map(|(n, w)| n.to_le_bytes()[..*w].to_vec()).collect()
    };
    let none = u64::MAX;
    binary(
        Format::OracleGeneral,
        true,
        &[
            pack(&[(5, 4), (9, 8), (100, 4), (none, 8)]),
            pack(&[(6, 4), (8, 8), (50, 4), (none, 8)]),
        ],
        kv(s(1), Op::Get, 8, 50),
    );
    binary(
        Format::OracleGeneralOpNs,
        true,
        &[
            pack(&[(5, 4), (9, 8), (100, 4), (1, 1), (2, 2), (none, 8)]),
            pack(&[(6, 4), (8, 8), (50, 4), (3, 1), (2, 2), (none, 8)]),
        ],
        Request { app: 2, ..kv(s(1), Op::Set, 8, 50) },
    );
    binary(
        Format::Twr,
        false,
        &[
            pack(&[(5, 4), (9, 8), (1, 4), (1 << 24, 4)]),
            pack(&[(6, 4), (8, 8), (20 << 22 | 50, 4), (9 << 24 | 60, 4)]),
        ],
        Request { key_size: 20, ttl: 60, ..kv(s(1), Op::Delete, 8, 50) },
    );
    binary(
        Format::StandardIqi,
        false,
        &[pack(&[(5, 4), (9, 8), (100, 4)]), pack(&[(6, 4), (8, 8), (50, 4)])],
        kv(s(1), Op::Get, 8, 50),
    );
    binary(Format::U32Be, false, &[vec![0, 0, 0, 1, 0, 0, 1, 0]], kv(None, Op::Get, 256, 1));
    binary(
        Format::I64Be,
        false,
        &[vec![0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0]],
        kv(None, Op::Get, 256, 1),
    );
    let vscsi2 = |op: u64, lbn: u64, t: u64| {
        pack(&[(op, 2), (0x200, 2), (1, 4), (512, 4), (1, 4), (lbn, 8), (t, 8), (1, 8)])
    };
    binary(
        Format::Vscsi2,
        true,
        &[vscsi2(0x28, 8, 1), vscsi2(0x2a, 16, 3)],
        io(us(2), Op::Write, 0, 8192, 512),
    );
    let vscsi1 = |op: u64, lbn: u64, t: u64| {
        pack(&[(1, 4), (512, 4), (1, 4), (op, 2), (0x100, 2), (lbn, 8), (t, 8)])
    };
    binary(
        Format::Vscsi1,
        true,
        &[vscsi1(0x28, 8, 1), vscsi1(0x8a, 16, 3)],
        io(us(2), Op::Write, 0, 8192, 512),
    );
    let blk = |action: u64, sector: u64, t: u64| {
        let head = [
            (0x6561_7407, 4),
            (1, 4),
            (t, 8),
            (sector, 8),
            (4096, 4),
            (action, 4),
            (9, 4),
            (3, 4),
            (0, 4),
            (0, 2),
            (3, 2),
        ];
        [pack(&head), vec![1, 2, 3]].concat()
    };
    binary(
        Format::BlkTrace,
        true,
        &[blk(0x1_0001, 8, 1000), blk(0x1_0007, 8, 1500), blk(0x1002_0001, 16, 2000)],
        Request { class: Class::Metadata, ..io(us(1), Op::Write, 3, 8192, 4096) },
    );
    let be = |words: &[u32]| words.iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<u8>>();
    let srt = |sec, kib, flags| be(&[52, 4 << 16 | 1, sec, 0, 0, 0, 2048, kib, 1, 0, 0, flags, 0]);
    binary(
        Format::Srt,
        true,
        &[b"$$TR_IOREC-1.3\0 header\x0c".to_vec(), srt(5, 4, 1), srt(6, 8, 2)],
        io(s(1), Op::Write, 1, 8192, 2048),
    );
    let lcs = |version: u64, record: &[Vec<u8>]| {
        let mut head = vec![0u8; 8192];
        head[..8].copy_from_slice(&0x1234_5678_9abc_def0u64.to_le_bytes());
        head[8..16].copy_from_slice(&version.to_le_bytes());
        head[8184..].copy_from_slice(&0x0fed_cba9_8765_4321u64.to_le_bytes());
        [head, record.concat()].concat()
    };
    let v3 = |t: u64, id: u64, op: u64| {
        pack(&[(t, 4), (id, 8), (70, 8), (5 << 8 | op, 4), (60, 4), (none, 8)])
    };
    binary(
        Format::Lcs,
        true,
        &[lcs(3, &[v3(5, 9, 1), v3(6, 8, 3)])],
        Request { app: 5, ttl: 60, ..kv(s(1), Op::Set, 8, 70) },
    );
    let mut native = NativeWriter::new(Vec::new()).unwrap();
    let second = Request {
        app: 3,
        key_size: 9,
        ttl: 1,
        class: Class::Metadata,
        host: 700,
        ..io(s(1), Op::Trim, 3, 1 << 40, 512)
    };
    for r in [
        Request { time: s(0), ..Request::get(1, 2) },
        second,
        Request { time: s(1), ..Request::get(u64::MAX, 0) },
    ] {
        native.push(&r).unwrap();
    }
    out.push((Format::Larder, true, native.finish().unwrap(), second));
    out
}

#[test]
fn samples_decode_and_are_recognised() {
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
    assert!(empty.contains("it is empty"), "{empty}");
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
        assert!(error.is_none() && skipped == 1, "{format}: {error:?}, {skipped} skipped");
        assert!(kept.len() >= all.len() && kept.len() <= whole, "{format}");
    }
    assert_eq!(silent, [Format::Txt]);
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
