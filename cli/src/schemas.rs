//! The schemas of the command. `UZONE_WRITE_SCHEMAS=1 cargo test -p uzone-cli schemas` writes them.

use std::path::Path;

use schemars::JsonSchema;
use uzone_cli::exit::ErrorObject;
use uzone_cli::output::Report;
use uzone_cli::schema::{check, of};
use uzone_report::{TRACE_SCHEMA, Trace};

fn report<R: Report + JsonSchema>(description: &str) -> (String, String) {
    of::<R>(R::SCHEMA, description)
}

fn all() -> Vec<(String, String)> {
    vec![
        of::<ErrorObject>("uzone.error/1", "A failure, printed with --json in place of a result."),
        of::<Trace>(TRACE_SCHEMA, "The page faults of a mapping."),
        report::<crate::demo::Demo>("The result of `uzone demo --json`."),
        report::<crate::diff::Step>("A line of `uzone diff --json` for each step."),
        report::<crate::doctor::Doctor>("The result of `uzone doctor --json`."),
        report::<crate::image::inspect::InspectReport>("The result of `uzone inspect --json`."),
        report::<crate::image::pack::PackReport>("The result of `uzone pack --json`."),
        report::<crate::image::unpack::UnpackReport>("The result of `uzone unpack --json`."),
        report::<crate::image::verify::VerifyReport>("The result of `uzone verify --json`."),
        report::<crate::offload::OffloadReport>("The result of `uzone offload --json`."),
        report::<crate::report::Written>("The result of `uzone report --json`."),
        report::<crate::serve::Line<'_>>("A line of `uzone serve --json` for each event."),
        report::<crate::status::StatusReport>(
            "The result of `uzone status` and `uzone drain` with --json.",
        ),
    ]
}

#[test]
fn each_schema_is_made_of_the_type_that_is_printed() {
    check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("schema"), all());
}
