-- Attachments by hash, exactly as stored.
SELECT * FROM raw.media
