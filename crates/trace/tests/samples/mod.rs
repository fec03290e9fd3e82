//! A small trace in every format, for tests of the readers here and of the commands that use them.

use larder_base::Nanos;
use larder_trace::{Class, Format, NativeWriter, Op, Request};

/// (format, detected without being named, sample, what its second request is).
pub(crate) fn samples() -> Vec<(Format, bool, Vec<u8>, Request)> {
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
    let file = larder_trace::hash_key(b"f");
    text(
        Format::Thesios,
        true,
        "filename,file_offset,application,c_time,io_zone,redundancy_type,op_type,service_class,from_flash_cache,cache_hit,request_io_size_bytes\n\
         f,0,a,100.5,WARM,r,READ,s,0,0,512\nf,4096,a,101.5,WARM,r,WRITE,s,0,0,1024\n",
        Request { id: file ^ 8, ..io(s(1), Op::Write, file as u32, 4096, 1024) },
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
    binary(
        Format::TwrNs,
        false,
        &[
            pack(&[(5, 4), (9, 8), (1, 4), (1 << 24, 4), (7, 2)]),
            pack(&[(6, 4), (8, 8), (20 << 22 | 50, 4), (3 << 24 | 60, 4), (300, 2)]),
        ],
        Request { app: 300, key_size: 20, ttl: 60, ..kv(s(1), Op::Set, 8, 50) },
    );
    binary(
        Format::StandardIqq,
        false,
        &[pack(&[(5, 4), (9, 8), (100, 8)]), pack(&[(6, 4), (8, 8), (1 << 33, 8)])],
        kv(s(1), Op::Get, 8, 1 << 33),
    );
    binary(
        Format::StandardIii,
        false,
        &[pack(&[(5, 4), (9, 4), (100, 4)]), pack(&[(6, 4), (8, 4), (50, 4)])],
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
