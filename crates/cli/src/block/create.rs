//! `larder block create`.

use larder_base::ByteSize;
use larder_block::backing::{OpenOptions, Uri, object};
use larder_runtime::plain;

use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  larder block create s3://bucket/vm1 --size 100g
  larder block create 's3://bucket/vm1?endpoint=http://minio:9000' \\
      --size 1t --chunk 4m
  larder block create file:/srv/disk.img --size 20g

Credentials, region and endpoint of an object store come from the environment, as for other S3 clients: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL.";

/// Make an empty volume in an object store, or an empty file
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// s3://BUCKET/PREFIX or file:PATH
    #[arg(value_name = "URI")]
    uri: String,
    /// Size of the volume
    #[arg(long, value_name = "SIZE")]
    size: ByteSize,
    /// Bytes of one object, 64k to 16m, a power of two [default: 1m, more for volumes beyond 1 TiB]. A small write rewrites a
    /// whole object
    #[arg(long, value_name = "SIZE")]
    chunk: Option<ByteSize>,
}

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    let usage = |text: String| CliError::Usage(text);
    let uri: Uri = args.uri.parse().map_err(|e| usage(format!("{e}")))?;
    match &uri {
        Uri::S3 { .. } => {
            let chunk = args.chunk.map(checked_chunk).transpose()?;
            if args.size.0 == 0 || !args.size.0.is_multiple_of(512) {
                let size = args.size;
                return Err(usage(format!("--size {size}: a volume has a multiple of 512 bytes")));
            }
            let seed = super::seed()?;
            let mut volume = [0u8; 16];
            volume.copy_from_slice(&seed[..16]);
            let options = OpenOptions::default();
            let made = object::create(&uri, args.size.0, chunk, volume, &options)
                .map_err(|e| CliError::Runtime(e.to_string()))?;
            outln!(
                "{uri}: a volume of {} in objects of {}",
                args.size,
                ByteSize(u64::from(made.chunk))
            )?;
        }
        Uri::File { .. } if args.chunk.is_some() => {
            return Err(usage("--chunk is for object stores".to_owned()));
        }
        Uri::File { path } => {
            if args.size.0 == 0 {
                return Err(usage("--size 0: a volume has at least one byte".to_owned()));
            }
            let failed = |e: std::io::Error| {
                let why = match e.kind() {
                    std::io::ErrorKind::AlreadyExists => {
                        "it is there already, and may hold data: name another path, or serve it as it is".to_owned()
                    }
                    _ => plain(&e),
                };
                CliError::Runtime(format!("'{}' cannot be made: {why}", path.display()))
            };
            let file = std::fs::File::create_new(path).map_err(failed)?;
            file.set_len(args.size.0).map_err(failed)?;
            outln!("{}: a file of {}", path.display(), args.size)?;
        }
        Uri::NbdUnix { .. } | Uri::NbdTcp { .. } => {
            return Err(usage(format!(
                "'{uri}': volumes of an NBD server are made there; write s3://BUCKET/PREFIX or file:PATH"
            )));
        }
    }
    Ok(())
}

/// Bytes of one object, if there may be such objects.
fn checked_chunk(chunk: ByteSize) -> Result<u32, CliError> {
    let (least, most) = object::manifest::CHUNK_BYTES;
    let bytes = u32::try_from(chunk.0).ok().filter(|bytes| bytes.is_power_of_two());
    bytes.filter(|bytes| (least..=most).contains(bytes)).ok_or_else(|| {
        CliError::Usage(format!(
            "--chunk {chunk}: objects have a power of two of bytes from {} to {}",
            ByteSize(u64::from(least)),
            ByteSize(u64::from(most))
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_object_that_cannot_be_are_wrong_usage() {
        assert_eq!(checked_chunk(ByteSize(1 << 20)).unwrap(), 1 << 20);
        for wrong in [0, 3 << 10, 32 << 10, 100 << 10, 32 << 20, 1 << 40] {
            let Err(CliError::Usage(said)) = checked_chunk(ByteSize(wrong)) else {
                panic!("{wrong}")
            };
            assert!(said.contains("from 64 KiB to 16 MiB"), "{said}");
        }
    }
}
