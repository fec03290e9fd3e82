//! Results as a table of named columns.

use serde_json::Value;

/// One field of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    /// Not there.
    Nothing,
    /// A whole number.
    Whole(i64),
    /// A number.
    Number(f64),
    /// Text, or what is written as it.
    Text(String),
}

impl Field {
    pub(crate) fn of(value: &Value) -> Field {
        match value {
            Value::Null => Field::Nothing,
            Value::Bool(b) => Field::Text(b.to_string()),
            Value::String(s) => Field::Text(s.clone()),
            Value::Number(n) => match n.as_i64() {
                Some(i) => Field::Whole(i),
                None => n.as_f64().map_or(Field::Nothing, Field::Number),
            },
            other => Field::Text(other.to_string()),
        }
    }

    /// As a number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Field::Whole(n) => Some(*n as f64),
            Field::Number(x) => Some(*x),
            _ => None,
        }
    }

    /// As text; numbers as they read back to the same number.
    pub fn text(&self) -> String {
        match self {
            Field::Nothing => String::new(),
            Field::Whole(n) => n.to_string(),
            Field::Number(x) => x.to_string(),
            Field::Text(s) => s.clone(),
        }
    }
}

impl From<&toml::Value> for Field {
    fn from(value: &toml::Value) -> Field {
        match value {
            toml::Value::Integer(n) => Field::Whole(*n),
            toml::Value::Float(x) => Field::Number(*x),
            other => Field::Text(shown(other)),
        }
    }
}

/// A value as it stands in tables and messages: text without quotes, tables as JSON.
pub fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(n) => n.to_string(),
        toml::Value::Float(x) => x.to_string(),
        toml::Value::Boolean(b) => b.to_string(),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Whole numbers.
    Whole,
    /// Numbers.
    Number,
    /// Text.
    Text,
}

/// Rows of fields under named columns, which come in the order in which they were first met.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grid {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Rows, each as long as `columns`.
    pub rows: Vec<Vec<Field>>,
}

impl Grid {
    /// Adds a row: `named` fields, and then every leaf of `value`, tables flattened with `_` between names; lists are left
    /// out. `Null` makes a column without a value.
    pub fn push(&mut self, named: &[(String, Field)], value: &Value) {
        let mut row = vec![Field::Nothing; self.columns.len()];
        for (name, field) in named {
            self.put(&mut row, name, field.clone());
        }
        self.flatten(&mut row, "", value);
        for earlier in &mut self.rows {
            earlier.resize(self.columns.len(), Field::Nothing);
        }
        self.rows.push(row);
    }

    fn flatten(&mut self, row: &mut Vec<Field>, prefix: &str, value: &Value) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    let name =
                        if prefix.is_empty() { name.clone() } else { format!("{prefix}_{name}") };
                    self.flatten(row, &name, value);
                }
            }
            Value::Array(_) => {}
            leaf if !prefix.is_empty() => self.put(row, prefix, Field::of(leaf)),
            _ => {}
        }
    }

    fn put(&mut self, row: &mut Vec<Field>, name: &str, field: Field) {
        let at = match self.columns.iter().position(|c| c == name) {
            Some(at) => at,
            None => {
                self.columns.push(name.to_owned());
                self.columns.len() - 1
            }
        };
        row.resize(self.columns.len(), Field::Nothing);
        row[at] = field;
    }

    /// Where the column of this name is.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|c| c == name)
    }

    /// What column `at` holds: text if any field is text, numbers if any is not whole.
    pub fn kind(&self, at: usize) -> Column {
        let mut kind = Column::Whole;
        for row in &self.rows {
            match row[at] {
                Field::Text(_) => return Column::Text,
                Field::Number(_) => kind = Column::Number,
                Field::Whole(_) | Field::Nothing => {}
            }
        }
        kind
    }

    /// As CSV (RFC 4180, lines ended by LF), names in the first line.
    pub fn csv(&self) -> String {
        let mut out = String::new();
        let mut line = |fields: &mut dyn Iterator<Item = String>| {
            let quoted: Vec<String> = fields
                .map(|f| {
                    if f.contains([',', '"', '\n', '\r']) {
                        format!("\"{}\"", f.replace('"', "\"\""))
                    } else {
                        f
                    }
                })
                .collect();
            out.push_str(&quoted.join(","));
            out.push('\n');
        };
        line(&mut self.columns.iter().cloned());
        for row in &self.rows {
            line(&mut row.iter().map(Field::text));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tables_are_flattened_and_columns_come_as_met() {
        let mut grid = Grid::default();
        let axis = |n| [("seed".to_owned(), Field::Whole(n))];
        grid.push(
            &axis(1),
            &json!({ "a": { "b": 1, "c": { "d": 0.1 } }, "l": [1], "t": "x,\"y\"" }),
        );
        grid.push(&axis(2), &json!({ "a": { "b": 2.5 }, "e": null, "big": u64::MAX }));
        assert_eq!(grid.columns, ["seed", "a_b", "a_c_d", "t", "big", "e"]);
        assert_eq!(grid.rows[0].len(), 6);
        let kinds: Vec<Column> = (0..6).map(|i| grid.kind(i)).collect();
        use Column::{Number, Text, Whole};
        assert_eq!(kinds, [Whole, Number, Number, Text, Number, Whole]);
        let csv = grid.csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines[0], "seed,a_b,a_c_d,t,big,e");
        assert_eq!(lines[1], "1,1,0.1,\"x,\"\"y\"\"\",,");
        assert_eq!(lines[2], "2,2.5,,,18446744073709552000,");
    }
}
