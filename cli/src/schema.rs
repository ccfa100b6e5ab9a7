//! Schemas of JSON documents, made of the types that are printed: a test writes them, and fails when they differ.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::json;

/// The variable with which [`check`] writes the schemas.
const WRITE: &str = "UZONE_WRITE_SCHEMAS";

/// Returns the name of the file for a schema such as `uzone.demo/1`, and its text.
///
/// # Panics
/// If the type becomes no JSON object.
pub fn of<T: JsonSchema>(name: &str, description: &str) -> (String, String) {
    let generator = SchemaSettings::draft2020_12().for_serialize().into_generator();
    let mut schema = generator.into_root_schema_for::<T>().to_value();
    let file = format!("{}.schema.json", name.replace('/', "-"));
    schema["$id"] = file.clone().into();
    schema["title"] = name.into();
    schema["description"] = description.into();
    schema["properties"]["schema"] = json!({ "const": name });
    // Variants have required fields of their own.
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let others = required.into_iter().filter(|field| field != "schema");
    schema["required"] = std::iter::once("schema".into()).chain(others).collect();
    (file, format!("{schema:#}\n"))
}

/// Checks that a folder has these schemas and no others, or with `UZONE_WRITE_SCHEMAS=1` writes them.
///
/// # Panics
/// If a schema differs from its type, or the folder has another file.
pub fn check(folder: &Path, schemas: impl IntoIterator<Item = (String, String)>) {
    let schemas: BTreeMap<String, String> = schemas.into_iter().collect();
    if env::var_os(WRITE).is_some() {
        for (file, text) in &schemas {
            fs::write(folder.join(file), text).expect("a schema can be written");
        }
    }
    let read = fs::read_dir(folder).expect("a folder of schemas").map(|entry| {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read_to_string(path).expect("a text"))
    });
    for (file, text) in read.collect::<BTreeMap<_, _>>() {
        let is_it = schemas.get(&file) == Some(&text);
        assert!(is_it, "{file} is not the schema of its type: run this test with {WRITE}=1");
    }
    let all = fs::read_dir(folder).map_or(0, Iterator::count);
    assert_eq!(all, schemas.len(), "a schema is missing: run this test with {WRITE}=1");
}
