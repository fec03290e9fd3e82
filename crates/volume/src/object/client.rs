//! How an S3-compatible store is reached.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};

use crate::{Timeouts, Uri};

/// The client and the prefix. Credentials, region and endpoint come from the environment as for every S3 client
/// (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, web identity, the
/// instance's or container's role); the URI's parameters come before them.
///
/// # Errors
/// What is wrong.
pub(crate) fn connect(
    uri: &Uri,
    timeout: Timeouts,
) -> Result<(Box<dyn ObjectStore>, Path), String> {
    let Uri::S3 { bucket, prefix, endpoint, region } = uri else {
        return Err("is not an object store".into());
    };
    // reqwest has no cryptography of its own here; another part of the process may have chosen one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let environment = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let endpoint = endpoint
        .clone()
        .or_else(|| environment("AWS_ENDPOINT_URL_S3"))
        .or_else(|| environment("AWS_ENDPOINT_URL"));
    let region = region
        .clone()
        .or_else(|| environment("AWS_REGION"))
        .or_else(|| environment("AWS_DEFAULT_REGION"))
        .unwrap_or_else(|| "us-east-1".to_owned());
    let options = ClientOptions::new()
        .with_connect_timeout(timeout.connect)
        // Each try has a limit of its own, which depends on what it is for.
        .with_timeout_disabled()
        .with_pool_idle_timeout(Duration::from_secs(60))
        .with_allow_http(endpoint.as_ref().is_some_and(|e| e.starts_with("http://")));
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_region(region)
        .with_client_options(options)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() });
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    let store = builder.build().map_err(|e| e.to_string())?;
    let prefix = Path::parse(prefix).map_err(|e| format!("its prefix: {e}"))?;
    Ok((Box::new(Arc::new(store)), prefix))
}
