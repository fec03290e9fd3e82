//! A [`Grid`] as a Parquet file.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{Type, TypePtr};

use crate::report::{Column, Field, Grid};

/// Why a Parquet file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("parquet: {0}")]
pub struct ParquetFailed(#[from] ParquetError);

/// Writes the grid as one row group: whole numbers as INT64, numbers as DOUBLE, text as strings, each optional. `facts` go
/// into the file's metadata.
///
/// # Errors
/// What writing to `out` gives.
pub fn write_parquet<W: Write + Send>(
    grid: &Grid,
    facts: &[(String, String)],
    out: W,
) -> Result<(), ParquetFailed> {
    let kinds: Vec<Column> = (0..grid.columns.len()).map(|at| grid.kind(at)).collect();
    let mut fields: Vec<TypePtr> = Vec::new();
    for (name, kind) in grid.columns.iter().zip(&kinds) {
        let physical = match kind {
            Column::Whole => Physical::INT64,
            Column::Number => Physical::DOUBLE,
            Column::Text => Physical::BYTE_ARRAY,
        };
        let logical = (*kind == Column::Text).then_some(LogicalType::String);
        let field = Type::primitive_type_builder(name, physical)
            .with_repetition(Repetition::OPTIONAL)
            .with_logical_type(logical)
            .build()?;
        fields.push(Arc::new(field));
    }
    let schema = Arc::new(Type::group_type_builder("rows").with_fields(fields).build()?);
    let metadata = facts
        .iter()
        .map(|(k, v)| parquet::file::metadata::KeyValue::new(k.clone(), v.clone()))
        .collect();
    let properties = WriterProperties::builder()
        .set_created_by(format!("larder {}", env!("CARGO_PKG_VERSION")))
        .set_key_value_metadata(Some(metadata))
        .build();
    let mut writer = SerializedFileWriter::new(out, schema, Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    for (at, kind) in kinds.iter().enumerate() {
        let Some(mut column) = group.next_column()? else { break };
        let fields = || grid.rows.iter().map(|row| &row[at]);
        let levels: Vec<i16> = fields().map(|f| i16::from(!matches!(f, Field::Nothing))).collect();
        match kind {
            Column::Whole => {
                let values: Vec<i64> = fields()
                    .filter_map(|f| if let Field::Whole(n) = f { Some(*n) } else { None })
                    .collect();
                column.typed::<Int64Type>().write_batch(&values, Some(&levels), None)?;
            }
            Column::Number => {
                let values: Vec<f64> = fields().filter_map(Field::number).collect();
                column.typed::<DoubleType>().write_batch(&values, Some(&levels), None)?;
            }
            Column::Text => {
                let values: Vec<ByteArray> = fields()
                    .filter(|f| !matches!(f, Field::Nothing))
                    .map(|f| ByteArray::from(f.text().into_bytes()))
                    .collect();
                column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)?;
            }
        }
        column.close()?;
    }
    group.close()?;
    writer.close()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;
    use serde_json::json;

    #[test]
    fn what_is_written_reads_back() {
        let mut grid = Grid::default();
        for i in 0..100i64 {
            let value = json!({ "policy": format!("p{i}"), "miss": i as f64 / 3.0,
                "life": (i % 3 != 0).then_some(i), "none": null });
            grid.push(&[("seed".to_owned(), Field::Whole(i))], &value);
        }
        let mut file = Vec::new();
        write_parquet(&grid, &[("trace_hash".into(), "abc".into())], &mut file).unwrap();
        let reader = SerializedFileReader::new(bytes::Bytes::from(file)).unwrap();
        let metadata = reader.metadata().file_metadata();
        assert_eq!(metadata.num_rows(), 100);
        let facts = metadata.key_value_metadata().unwrap();
        assert!(facts.iter().any(|f| f.key == "trace_hash" && f.value.as_deref() == Some("abc")));
        let at = |name: &str| grid.column(name).unwrap();
        for (i, row) in reader.get_row_iter(None).unwrap().enumerate() {
            let row = row.unwrap();
            assert_eq!(row.get_long(at("seed")).unwrap(), i as i64);
            assert_eq!(row.get_double(at("miss")).unwrap(), i as f64 / 3.0);
            assert_eq!(row.get_string(at("policy")).unwrap(), &format!("p{i}"));
            assert_eq!(row.get_long(at("life")).is_ok(), i % 3 != 0);
            assert!(row.get_long(at("none")).is_err());
        }
    }
}
